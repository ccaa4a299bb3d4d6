// Elements from data. Text becomes text nodes and styles go through the CSSOM, so nothing that the
// API says can become markup, and the page needs no inline style or script.

const there = (child) => child !== null && child !== undefined && child !== false && child !== "";

/** Return an element; attributes that are null or false are left out, `style` is an object. */
export function h(tag, attributes = {}, ...children) {
  const element = document.createElement(tag);
  for (const [name, value] of Object.entries(attributes)) {
    if (name === "style") {
      for (const [property, text] of Object.entries(value)) {
        element.style.setProperty(property, text);
      }
    } else if (there(value) || value === "") {
      element.setAttribute(name, value === true ? "" : value);
    }
  }
  element.append(...children.flat(Infinity).filter(there));
  return element;
}

/** Make `element` hold `children`, changing as little as possible: focus and scroll stay. */
export function show(element, ...children) {
  mend(element, children.flat(Infinity).filter(there).map(asNode));
}

function asNode(child) {
  return child instanceof Node ? child : document.createTextNode(child);
}

function mend(old, wanted) {
  const now = [...old.childNodes];
  wanted.forEach((child, place) => {
    const present = now[place];
    if (!present) old.append(child);
    else if (present.nodeName !== child.nodeName) present.replaceWith(child);
    else if (child.nodeType === Node.TEXT_NODE) {
      if (present.data !== child.data) present.data = child.data;
    } else {
      mendAttributes(present, child);
      mend(present, [...child.childNodes]);
    }
  });
  for (const rest of now.slice(wanted.length)) rest.remove();
}

function mendAttributes(old, wanted) {
  for (const { name } of [...old.attributes]) {
    if (name !== "style" && !wanted.hasAttribute(name)) old.removeAttribute(name);
  }
  for (const { name, value } of wanted.attributes) {
    if (name !== "style" && old.getAttribute(name) !== value) old.setAttribute(name, value);
  }
  if (old.style.cssText !== wanted.style.cssText) old.style.cssText = wanted.style.cssText;
}

export const byId = (id) => document.getElementById(id);
