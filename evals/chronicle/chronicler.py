"""Generate sentences of a survey's chronicle: clauses within clauses, from a seed, without end.

A sentence is expanded from `GRAMMAR`. Noun phrases hold noun phrases down to a depth, so a whole sentence practically
never repeats. The party's four officers and its station stay the same for a page of sentences, and the number of the
journey's stage rises. The invariant: the text depends on the seed alone, has no digits and no hyphens, and each
sentence ends with one of `. ? !`.
"""

import random
import re
from collections.abc import Iterator, Sequence
from typing import Any

from evals.chronicle import word_lists as words

PAGE_SENTENCES = 18
DEEPEST = 2
NESTED = ("thing", "finding", "gloss", "tail")
MOST_COUNTED, MOST_ORDINAL = 999, 60

GRAMMAR: dict[str, str] = {
    "sentence": """
        During the {stage} stage {officer} {handled} {thing}, {whose_state}, and {count} {weight} of {mineral}.
        Although {thing} had been {handled} by {officer}, {thing2} {turned_out} {quality} {locus}.
        Whereas {toponym} yields {mineral}, {toponym2} furnishes only {mineral} and {quality} {mineral}, {gloss}.
        {Officer}, having {handled} {thing}, {held} that {finding}.
        Measured from {landform_the} to {landform_the}, {thing} extended {count} {unit}, {gloss}.
        {Count} sprigs of {quality} {plant}, each {quality} and {quality}, were {handled} {locus} and then {handled}.
        The {instrument} indicated {count} units; the {instrument}, {handled} {locus}, indicated {count}.
        Unless {finding}, {thing} cannot have been {handled} {adverb}.
        {Finding}, {officer} {held}, inasmuch as {finding}; {officer}, however, {held} that {finding}.
        According to {officer}, whom {officer} had {adverb} {accused} of {fault}, {finding}.
        Inventory {locus}: {count} {tools}, {count} {quality} {tools}, {count} {weight} of {mineral} and {thing}.
        Had {officer} not {adverb} {handled} {thing}, {thing2} would have {caused} {thing3}.
        Both {thing} and {thing2}, {gloss}, were {handled} {adverb} {locus}.
        {Adverb}, yet with {count} {unit} of uncertainty, {officer} {handled} {thing} {locus}.
        Wherever {mineral} crops out, {plant} flourishes, provided that {finding}.
        By the {ordinal} reckoning {thing} appeared {quality}, by the {ordinal2} {quality}, {gloss}.
        Could {thing} have {caused} {thing2} without being {handled} by {officer}?
        The {ordinal} folio of the {record}, {handled} by {officer}, enumerates {thing}, {thing2} and {thing3}.
        That {finding} was {handled} {adverb} by {officer}, who {held} further that {finding}.
        Not only {mineral} but also {thing} occurred {locus}, as {officer} {held}.
        Such {specimens} as {officer} {handled} {locus} resembled {thing}, except that {finding}.
        {Toponym}, {count} {unit} {bearing} of {toponym2}, is notable for {thing} and for {quality} {mineral}.
        Among {specimens} {handled} {locus}, {count} were {quality}, {count} {quality}, and the remainder {quality}.
        Because {finding}, the {record} {adverb} omits {thing}, {gloss}.
        So {adverb} had {thing} {caused} {thing2} that {officer} {handled} {thing3} instead.
        {Officer} and {officer2} disagreed: the former {held} that {finding}, the latter that {finding2}.
        {Thing} underlay {thing2}, and {thing2} {thing3}, {gloss}.
        Neither erosion nor {calamity} accounts for how {thing} {caused} {thing2} {locus}.
        To have {handled} {thing} required {count} {tools} and, {adverb}, {count} {weight} of {mineral}.
        What {officer} {handled} as {thing} was, {adverb}, {thing2} {locus}.
        Compare {thing} ({record} {count}) with {thing2}, {handled} by {officer}: {finding}.
        After {calamity} {adverb} {caused} {thing}, {officer} proceeded {bearing} to {toponym}, {count} {unit} inland.
        If, as {officer} {held}, {finding}, then {finding2}, and {calamity} is inevitable!
        The expedition's {office}, {officer}, substituted {thing} for {thing2} until {finding}.
        Between {toponym} and {toponym2}, where {finding}, {officer} {handled} no fewer than {count} {specimens}.
        Their ration, {count} {weight} of {foodstuff} and {count} of {foodstuff}, was {handled} {adverb} by {officer}.
    """,
    "finding": """
        {thing} {turned_out} {quality}|{thing} {caused} {thing2}|{mineral} predominates {locus}
        {thing} had been {handled} {adverb}|{plant} does not tolerate {mineral}|{calamity} {caused} {thing}
        the {instrument} deviated by {count} units|{count} {specimens} had migrated {bearing}
        {thing} contained {count} {weight} of {mineral}|{thing} and {thing2} are contemporaneous
        {thing} belonged to {toponym} rather than to {toponym2}|the {record} contradicts {officer} {locus}
        {specimens} subsist {adverb} upon {plant}|{thing} remained {quality} yet {quality}
    """,
    "thing": """
        {det} {quality} {landform}{tail}|{det} {landform} {locus}|{det} {instrument}{tail}|{det} {quality} {instrument}
        {det} {specimen}{tail}|{det} {quality} {specimen} {locus}|{count} {specimens}|{count} {specimens}{tail}
        {officer}'s {record}|{det} {quality} {record}{tail}|{count} {weight} of {mineral}|{quality} {mineral}{tail}
        {det} {landform} of {toponym}|{toponym}'s {quality} {landform}|{det} {tool}{tail}|{count} {quality} {tools}
        {det} {plant} thicket{tail}|{quality} {plant}{tail}
    """,
    "tail": """
        that {officer} had {handled} {locus}|which {calamity} had {caused}|beneath {thing}|adjoining {thing}
        encrusted with {mineral}|overgrown by {plant}|{handled} by {officer}|comparable to {thing}
        whose {attribute} {officer} {handled}|{bearing} of {toponym}|inhabited by {specimens}|{whose_state}
    """,
    "locus": """
        {bearing} of {toponym}|beneath {landform_the}|athwart {landform_the}|upstream from {toponym}|at {toponym}
        throughout {landform_the}|{count} {unit} inland|along {landform_the} of {toponym}|within {landform_the}
        opposite {toponym}|at an altitude of {count} {unit}|amid {quality} {mineral}|downstream from {landform_the}
    """,
    "gloss": """
        a discrepancy that {officer} attributed to {calamity}|{thing} notwithstanding|contrary to {officer}'s {record}
        as the {record} corroborates|which {officer} {held} to be {quality}|a circumstance peculiar to {toponym}
        {thing} excepted|presumably attributable to {calamity}|the {instrument} permitting|whereupon {officer} resigned
        so that {thing} became {quality}|although {finding}|since {finding}|pending {officer}'s {record}
    """,
    "whose_state": """
        whose {attribute} {turned_out} {quality}|itself {quality}|of which {count} {unit} remained {quality}
        hitherto {quality}|{adverb} {handled}|by then {quality}|neither {quality} nor {quality}
    """,
    "plain_finding": """
        {mineral} predominates {locus}|{plant} does not tolerate {mineral}|{plain_thing} {turned_out} {quality}
        {count} {specimens} had migrated {bearing}|{plain_thing} {caused} {plain_thing}
    """,
    "plain_thing": """
        {det} {quality} {landform}|{det} {instrument}|{count} {quality} {specimens}|{quality} {mineral}|{det} {specimen}
        {toponym}'s {landform}|{officer}'s {record}|{det} {tool}
    """,
    "plain_gloss": """
        {officer} permitting|{quality} {mineral} excepted|whereupon {officer} resigned|attributable to {calamity}
    """,
    "det": "the|the|a|that|this|another|each|the same|the {ordinal}",
    "landform_the": "the {landform}|the {quality} {landform}|{toponym}'s {landform}|that {landform}",
    "officer": "{surname}|{surname}|{surname}|the {office}|the {office} {surname}",
    "turned_out": "proved|became|remained|appeared",
    "accused": "absolved|accused|acquitted|convicted",
    "fault": "negligence|forgery|plagiarism|insubordination|exaggeration|haphazard arithmetic|smuggling {mineral}",
    "attribute": "gradient|diameter|circumference|buoyancy|salinity|density|pigment|latitude|longitude|plumage|bedrock",
    "calamity": """
        an avalanche|a monsoon|condensation|evaporation|an epidemic|a mutiny|subsidence|the thaw|the equinox|drought
        seismic activity|an embargo|a shipwreck|humidity|the refraction of {mineral}|permafrost|a landslip
    """,
    "foodstuff": "pemmican|lentils|oatmeal|molasses|barley|tinned mutton|suet|treacle|chicory|rusks|millet|sauerkraut",
    "bearing": "northeast|northwest|southeast|southwest|seaward|leeward|windward",
}
LISTS = {
    "surname": words.SURNAMES, "office": words.OFFICES, "mineral": words.MINERALS, "plant": words.PLANTS,
    "instrument": words.INSTRUMENTS, "tool": words.TOOLS, "landform": words.LANDFORMS, "specimen": words.SPECIMENS,
    "record": words.RECORDS, "unit": words.LENGTHS, "weight": words.WEIGHTS, "adverb": words.MANNERS,
    "quality": words.QUALITIES, "handled": words.HANDLED, "caused": words.CAUSED, "held": words.HELD_THAT,
}  # fmt: skip
PLURALS = {"starfish": "starfish", "chamois": "chamois", "bellows": "bellows", "lynx": "lynxes", "ibex": "ibexes",
           "nautilus": "nautiluses"}  # fmt: skip
UNITS_AND_TEENS = """
zero one two three four five six seven eight nine ten eleven twelve thirteen fourteen fifteen sixteen seventeen eighteen
nineteen
""".split()  # noqa: SIM905
TENS = "zero ten twenty thirty forty fifty sixty seventy eighty ninety".split()  # noqa: SIM905
ORDINALS = {"one": "first", "two": "second", "three": "third", "five": "fifth", "eight": "eighth", "nine": "ninth",
            "twelve": "twelfth"}  # fmt: skip
PARTS = {
    symbol: [
        [part for part in re.split(r"(\{\w+\})", option.strip()) if part]
        for option in re.split(r"[\n|]", options)
        if option.strip()
    ]
    for symbol, options in GRAMMAR.items()
}
ARTICLE = re.compile(r"\b([Aa]) (?=[aeiou])")


def spelled(number: int) -> str:
    """Return a number from 0 to 999,999 in words, without hyphens."""
    if number < 20:
        return UNITS_AND_TEENS[number]
    if number < 100:
        tens, rest = divmod(number, 10)
        return TENS[tens] + (f" {spelled(rest)}" if rest else "")
    size, name = (1000, "thousand") if number >= 1000 else (100, "hundred")
    many, rest = divmod(number, size)
    joint = " and " if rest < 100 else " "
    return f"{spelled(many)} {name}" + (joint + spelled(rest) if rest else "")


def ordinal(number: int) -> str:
    """Return the ordinal of a number in words."""
    before, space, last = spelled(number).rpartition(" ")
    return before + space + ORDINALS.get(last, last[:-1] + "ieth" if last.endswith("y") else last + "th")


def plural(noun: str) -> str:
    """Return the plural of a noun of the chronicle."""
    return PLURALS.get(noun, noun + "s")


def chronicle(seed: int) -> Iterator[str]:
    """Yield endless sentences of one seed."""
    chronicler = Chronicler(seed)
    while True:
        yield chronicler.sentence()


class Chronicler:
    """Draws sentences from one seed. It keeps a page's officers and places, and counts the journey's stages."""

    def __init__(self, seed: int) -> None:
        self.random = random.Random(f"chronicle-{seed}")
        self.num_told = 0
        self.stage = self.random.randint(1, MOST_ORDINAL)
        self.party: list[str] = []
        self.toponyms: list[str] = []

    def sentence(self) -> str:
        """Return the next sentence, with a capital and its final mark."""
        if self.num_told % PAGE_SENTENCES == 0:
            self.stage += 1
            self.party = self.random.sample(words.SURNAMES, 5)
            self.toponyms = [self._toponym() for _ in range(4)]
        self.num_told += 1
        text = ARTICLE.sub(r"\1n ", self._expand("sentence", 0))
        return text[0].upper() + text[1:]

    def _pick(self, items: Sequence[Any]) -> Any:
        return items[int(self.random.random() * len(items))]

    def _toponym(self) -> str:
        return self._pick(words.TOPONYM_BEGINS) + self._pick(words.TOPONYM_ENDS)

    def _expand(self, symbol: str, depth: int) -> str:
        parts = self._pick(PARTS[symbol])
        return "".join(self._fill(part[1:-1].rstrip("23"), depth) if part[0] == "{" else part for part in parts)

    def _fill(self, symbol: str, depth: int) -> str:
        """Return the text of a symbol: one of the grammar or of a word list, or a plural, a place or a number."""
        if symbol[0].isupper():
            text = self._fill(symbol.lower(), depth)
            return text[0].upper() + text[1:]
        if symbol in NESTED:
            depth += 1
            symbol = symbol if depth <= DEEPEST else f"plain_{symbol}"
        if symbol.endswith("tail"):
            return " " + self._expand("tail", depth) if depth <= DEEPEST else ""
        if symbol in PARTS:
            return self._expand(symbol, depth)
        if symbol in LISTS:
            return self._pick(self.party if symbol == "surname" else LISTS[symbol])
        if symbol.removesuffix("s") in LISTS:
            return plural(self._pick(LISTS[symbol.removesuffix("s")]))
        if symbol == "toponym":
            return self._pick(self.toponyms)
        if symbol == "count":
            return spelled(2 + int(MOST_COUNTED * self.random.random() ** 4))
        return ordinal(self.stage if symbol == "stage" else self.random.randint(2, MOST_ORDINAL))
