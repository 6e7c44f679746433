// Creates and changes elements. External data is set as text or as an attribute, never parsed as HTML.

const SVG = "http://www.w3.org/2000/svg";

/** Returns a new element with attributes and children; a child may be a string. */
export function el(tag, attributes = {}, ...children) {
  return fill(document.createElement(tag), attributes, children);
}

/** Returns a new SVG element. */
export function svg(tag, attributes = {}, ...children) {
  return fill(document.createElementNS(SVG, tag), attributes, children);
}

function fill(node, attributes, children) {
  setAttributes(node, attributes);
  node.append(...children);
  return node;
}

/** Sets attributes that differ; null or undefined removes one. */
export function setAttributes(node, attributes) {
  for (const [name, value] of Object.entries(attributes)) {
    if (value === null || value === undefined) node.removeAttribute(name);
    else if (node.getAttribute(name) !== String(value)) node.setAttribute(name, value);
  }
}

/** Sets the text of an element if it differs. */
export function setText(node, text) {
  if (node.textContent !== text) node.textContent = text;
}

/**
 * Shows `items` in order as children of `parent`. Elements are kept by key, created by `create(item)` and updated by
 * `update(node, item)`, so that focus, selection and scroll position survive an update.
 */
export function showEach(parent, items, key, create, update) {
  const known = new Map([...parent.children].map((node) => [node.dataset.key, node]));
  let at = parent.firstElementChild;
  for (const item of items) {
    const name = String(key(item));
    let node = known.get(name);
    known.delete(name);
    if (!node) {
      node = create(item);
      node.dataset.key = name;
    }
    update(node, item);
    if (node === at) at = at.nextElementSibling;
    else parent.insertBefore(node, at);
  }
  for (const node of known.values()) node.remove();
}
