// Making and changing elements. Whatever comes from outside is set as text or as an attribute, never read as HTML.

const SVG = "http://www.w3.org/2000/svg";

/** Return a new element with attributes and children; a child may be a string. */
export function el(tag, attributes = {}, ...children) {
  return fill(document.createElement(tag), attributes, children);
}

/** The same of SVG. */
export function svg(tag, attributes = {}, ...children) {
  return fill(document.createElementNS(SVG, tag), attributes, children);
}

function fill(node, attributes, children) {
  setAttributes(node, attributes);
  node.append(...children);
  return node;
}

/** Set attributes; null or undefined removes one. What is as it should be is left alone. */
export function setAttributes(node, attributes) {
  for (const [name, value] of Object.entries(attributes)) {
    if (value === null || value === undefined) node.removeAttribute(name);
    else if (node.getAttribute(name) !== String(value)) node.setAttribute(name, value);
  }
}

/** Set the text of an element unless it has it. */
export function setText(node, text) {
  if (node.textContent !== text) node.textContent = text;
}

/**
 * Make the children of `parent` show `items` in order: elements are kept by key, made by `create(item)` and brought up
 * to date by `update(node, item)`, so that focus, selection and scrolling outlive an update.
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
