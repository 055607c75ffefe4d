// Small helpers. What comes from the cluster is only ever set as text: no name or reason becomes HTML.

export const byId = (id) => document.getElementById(id);

const SVG = "http://www.w3.org/2000/svg";

export function make(tag, properties = {}, ...children) {
  const isSvg = ["svg", "rect", "polyline", "path"].includes(tag);
  const node = isSvg ? document.createElementNS(SVG, tag) : document.createElement(tag);
  for (const [name, value] of Object.entries(properties)) {
    if (name === "text") node.textContent = value;
    else node.setAttribute(name, value);
  }
  node.append(...children);
  return node;
}

// Nothing is touched that is as it should be: a screen reader, a selection and the focus stay where they are.
export function setText(node, value) {
  const text = value ?? "";
  if (node.textContent !== text) node.textContent = text;
}

export function setAttribute(node, name, value) {
  if (node.getAttribute(name) !== String(value)) node.setAttribute(name, value);
}

export function setHidden(node, isHidden) {
  if (node.hidden !== isHidden) node.hidden = isHidden;
}

const known = new WeakMap();

// The children of `parent`, one for each item: made once, kept in order, filled each time, removed with their item.
export function keep(parent, items, keyOf, makeChild, fill) {
  if (!known.has(parent)) known.set(parent, new Map());
  const children = known.get(parent);
  const present = new Set(items.map(keyOf));
  for (const [key, child] of children) {
    if (!present.has(key)) {
      child.nodes.forEach((node) => node.remove());
      children.delete(key);
    }
  }
  let at = parent.firstChild;
  for (const item of items) {
    const key = keyOf(item);
    let child = children.get(key);
    if (!child) {
      child = makeChild(item);
      children.set(key, child);
    }
    fill(child, item);
    for (const node of child.nodes) {
      if (node === at) at = at.nextSibling;
      else parent.insertBefore(node, at);
    }
  }
}

export const colourClass = (number) => `m${(number ?? 0) % 8}${(number ?? 0) % 16 >= 8 ? " striped" : ""}`;

export const swatch = (number) => make("span", { class: `swatch ${colourClass(number)}`, "aria-hidden": "true" });
