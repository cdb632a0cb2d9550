// Read Prometheus's text: the sums by name over all labels, and what each label's value adds.

const LINE = /^([a-zA-Z_:][\w:]*)(?:\{([^}]*)\})? (\S+)/;

export class MetricsText {
  // `model`: of several, the one whose samples count.
  constructor(text, model) {
    this.sums = new Map();
    this.described = new Map();
    for (const line of text.split("\n")) {
      if (line.startsWith("# HELP ")) {
        const [name, ...words] = line.slice(7).split(" ");
        this.described.set(name, words.join(" "));
      } else if (!line.startsWith("#")) {
        const found = LINE.exec(line);
        const of = found?.[2]?.match(/(?:^|,)model="([^"]*)"/)?.[1];
        if (found && (of === undefined || of === model)) this.sums.set(found[1], (this.sums.get(found[1]) ?? 0) + Number(found[3]));
      }
    }
  }

  // Return a gauge, or a counter by its name with or without `_total`; 0 where there is none.
  get(name) {
    return this.sums.get(`tandem_${name}`) ?? this.sums.get(`tandem_${name}_total`) ?? 0;
  }

  has(name) {
    return this.sums.has(`tandem_${name}`) || this.sums.has(`tandem_${name}_total`);
  }
}
