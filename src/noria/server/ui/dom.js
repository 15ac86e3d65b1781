// Elements are made one by one and texts put in as texts: nothing a model writes is ever read as HTML.

export const byId = (id) => document.getElementById(id);

/** element("button", {type: "button", class: "x", onclick: f, text: "Go"}, child, ...) */
export function element(tag, properties = {}, ...children) {
  const node = document.createElement(tag);
  for (const [name, value] of Object.entries(properties)) {
    if (value === undefined || value === null || value === false) continue;
    if (name === "text") node.textContent = value;
    else if (name.startsWith("on")) node.addEventListener(name.slice(2), value);
    else node.setAttribute(name, value === true ? "" : value);
  }
  node.append(...children);
  return node;
}

export function icon(name) {
  const node = byId("icon").content.firstElementChild.cloneNode(true);
  node.firstElementChild.setAttribute("href", `#i-${name}`);
  return node;
}

export function iconButton(name, label, onclick) {
  const properties = { type: "button", class: "quiet small", "data-icon": name, title: label, "aria-label": label, onclick };
  return element("button", properties, icon(name));
}

export async function copyText(text) {
  if (navigator.clipboard) return navigator.clipboard.writeText(text);
  // Browsers have no clipboard for pages that came by plain HTTP from another machine; the old way still works there.
  const field = element("textarea", { class: "unseen", "aria-hidden": "true" });
  field.value = text;
  const focused = document.activeElement;
  document.body.append(field);
  field.select();
  const copied = document.execCommand("copy");
  field.remove();
  focused?.focus();
  if (!copied) throw new Error("the browser does not let this page copy");
}

/** A button that copies what `text` returns, and says so for a moment. */
export function copyButton(text, label = "Copy") {
  const button = iconButton("copy", label, async () => {
    let said = "Copied";
    try {
      await copyText(text());
    } catch {
      said = "Not copied";
    }
    button.dataset.said = said;
    button.setAttribute("aria-label", said);
    setTimeout(() => {
      delete button.dataset.said;
      button.setAttribute("aria-label", label);
    }, 1500);
  });
  return button;
}

/** A text field as high as its text; where CSS (field-sizing) does not do it. */
export function growWithText(field) {
  if (CSS.supports("field-sizing", "content")) return;
  const grow = () => {
    field.style.height = "auto";
    field.style.height = `${field.scrollHeight}px`;
  };
  field.addEventListener("input", grow);
  grow();
}
