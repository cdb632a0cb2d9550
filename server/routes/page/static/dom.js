// Make elements. A string is always text: nothing here reads markup.

const SVG = "http://www.w3.org/2000/svg";
const PROPERTIES = new Set(["value", "checked", "disabled", "hidden", "open", "selected", "placeholder", "rows"]);

// Return an element; properties `on…` are listeners, those that are null or false are left out.
export function el(tag, properties = {}, ...children) {
  return fill(document.createElement(tag), properties, children);
}

// Return an element of a drawing.
export function svg(tag, properties = {}, ...children) {
  return fill(document.createElementNS(SVG, tag), properties, children);
}

function fill(node, properties, children) {
  for (const [name, value] of Object.entries(properties)) {
    if (value === null || value === undefined || value === false) continue;
    if (name.startsWith("on")) node.addEventListener(name.slice(2), value);
    else if (PROPERTIES.has(name)) node[name] = value;
    else node.setAttribute(name, value === true ? "" : String(value));
  }
  node.append(...children.flat().filter((child) => child !== null && child !== undefined && child !== false));
  return node;
}

export const byId = (id) => document.getElementById(id);

export function replace(parent, ...children) {
  parent.replaceChildren(...children.flat().filter(Boolean));
  return parent;
}

// Whether Enter sends: on a phone it is a new line, and a field with the focus covers half of the page.
export const hasKeyboard = () => matchMedia("(pointer: fine)").matches;

export const isSendKey = (event) => event.key === "Enter" && !event.shiftKey && !event.isComposing && hasKeyboard();

// Say something to those who listen to the page: once, when it matters, not for each token.
export function announce(text) {
  byId("announcements").textContent = text;
}

// Return an id. `crypto.randomUUID` is missing where the page came over plain HTTP from another machine.
export function newId(prefix) {
  const bytes = crypto.getRandomValues(new Uint8Array(12));
  return `${prefix}-${Array.from(bytes, (byte) => byte.toString(16).padStart(2, "0")).join("")}`;
}

// Copy a text, also where the browser's clipboard needs HTTPS. Return whether it worked.
export async function copyText(text) {
  try {
    await navigator.clipboard.writeText(text);
    return true;
  } catch {
    const area = el("textarea", { value: text, class: "hidden", "aria-hidden": "true" });
    document.body.append(area);
    area.select();
    const worked = document.execCommand("copy");
    area.remove();
    return worked;
  }
}

// Offer a text as a file.
export function saveFile(name, text, type) {
  const address = URL.createObjectURL(new Blob([text], { type }));
  const link = el("a", { href: address, download: name });
  document.body.append(link);
  link.click();
  link.remove();
  setTimeout(() => URL.revokeObjectURL(address), 10_000);
}
