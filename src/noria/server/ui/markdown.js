// The Markdown that models write, as DOM nodes: headings, paragraphs, lists, quotes, code, tables.

import { copyButton, element } from "./dom.js";
import { inline } from "./inline.js";

const MAX_DEPTH = 6;
const FENCE = /^ {0,3}(`{3,}|~{3,})[ \t]*([^\s`]*)[^`]*$/;
const HEADING = /^ {0,3}(#{1,6})[ \t]+(.*)$/;
const RULE = /^ {0,3}(?:(?:-[ \t]*){3,}|(?:\*[ \t]*){3,}|(?:_[ \t]*){3,})$/;
const QUOTE = /^ {0,3}> ?/;
const ITEM = /^(\s*)([-*+]|(\d{1,9})[.)])(?:[ \t]+|$)(.*)$/;
const TABLE_RULE = /^ {0,3}\|?[ \t]*:?-+:?[ \t]*(?:\|[ \t]*:?-+:?[ \t]*)*\|?[ \t]*$/;
const isBlank = (line) => line.trim() === "";
const indentOf = (line) => line.length - line.trimStart().length;

const sources = new WeakMap(); // what a block was made from

/** Shows `text` in `container`. Blocks that have not changed since the last call stay as they are, so a growing answer costs
 * little, and a selection in it survives. */
export function showMarkdown(container, text) {
  const wanted = blocks(text.replaceAll("\r\n", "\n").split("\n"));
  const there = container.children;
  let kept = 0;
  while (kept < wanted.length && kept < there.length && sources.get(there[kept]) === wanted[kept].source) kept += 1;
  while (there.length > kept) container.lastElementChild.remove();
  for (const block of wanted.slice(kept)) {
    const node = block.node(0);
    sources.set(node, block.source);
    container.append(node);
  }
}

function rendered(lines, depth) {
  if (depth >= MAX_DEPTH) return [element("p", {}, ...inline(lines.join("\n")))];
  return blocks(lines).map((block) => block.node(depth));
}

/** [{source, node(depth)}]: every block makes one node, later and only when it is new. */
function blocks(lines) {
  const found = [];
  for (let at = 0; at < lines.length; ) {
    if (isBlank(lines[at])) {
      at += 1;
      continue;
    }
    const { end, kind, node } = blockAt(lines, at);
    found.push({ source: kind + lines.slice(at, end).join("\n"), node });
    at = end;
  }
  return found;
}

function blockAt(lines, at) {
  const line = lines[at];
  if (FENCE.test(line)) return fence(lines, at);
  if (HEADING.test(line)) return { end: at + 1, kind: "h", node: () => heading(line) };
  if (RULE.test(line)) return { end: at + 1, kind: "r", node: () => element("hr") };
  if (QUOTE.test(line)) return quote(lines, at);
  if (ITEM.test(line)) return list(lines, at);
  if (isTable(lines, at)) return table(lines, at);
  return paragraph(lines, at);
}

function heading(line) {
  const [, marks, text] = HEADING.exec(line);
  // The page has its own first two levels.
  const tag = `h${Math.min(6, marks.length + 2)}`;
  return element(tag, {}, ...inline(text.replace(/[ \t]+#+[ \t]*$/, "")));
}

function fence(lines, at) {
  const [, mark, language] = FENCE.exec(lines[at]);
  let end = at + 1;
  const closes = (line) => {
    const text = line.trim();
    return text.length >= mark.length && text === mark[0].repeat(text.length);
  };
  while (end < lines.length && !closes(lines[end])) end += 1;
  const indent = indentOf(lines[at]);
  const code = lines.slice(at + 1, end).map((line) => line.slice(Math.min(indent, indentOf(line))));
  return { end: Math.min(end + 1, lines.length), kind: "c", node: () => codeBlock(code.join("\n"), language) };
}

function codeBlock(code, language) {
  return element(
    "figure",
    { class: "code" },
    element("figcaption", {}, element("span", { text: language || "code" }), copyButton(() => code, "Copy code")),
    element("pre", { tabindex: "0" }, element("code", { text: code })),
  );
}

function quote(lines, at) {
  let end = at;
  while (end < lines.length && QUOTE.test(lines[end])) end += 1;
  const inner = lines.slice(at, end).map((line) => line.replace(QUOTE, ""));
  return { end, kind: "q", node: (depth) => element("blockquote", {}, ...rendered(inner, depth + 1)) };
}

function list(lines, at) {
  const [, space, , number] = ITEM.exec(lines[at]);
  const isOrdered = number !== undefined;
  const base = space.length;
  const opensItem = (line) => {
    const item = line === undefined || RULE.test(line) ? null : ITEM.exec(line);
    return item && item[1].length < base + 2 && (item[3] !== undefined) === isOrdered ? item : null;
  };
  const items = [];
  let end = at;
  for (; end < lines.length; end += 1) {
    const line = lines[end];
    const item = opensItem(line);
    if (item) {
      items.push({ indent: line.length - item[4].length, lines: [item[4]] });
    } else if (isBlank(line)) {
      let next = end + 1;
      while (next < lines.length && isBlank(lines[next])) next += 1;
      if (next === lines.length || !(opensItem(lines[next]) || indentOf(lines[next]) >= base + 2)) break;
      items.at(-1).lines.push("");
    } else if (indentOf(line) >= base + 2) {
      items.at(-1).lines.push(line.slice(Math.min(items.at(-1).indent, indentOf(line))));
    } else if (beginsBlock(line) || isBlank(lines[end - 1])) {
      break;
    } else {
      items.at(-1).lines.push(line); // a lazy continuation
    }
  }
  const node = (depth) => {
    const start = isOrdered && number !== "1" ? { start: String(Number(number)) } : {};
    return element(isOrdered ? "ol" : "ul", start, ...items.map((item) => listItem(item.lines, depth)));
  };
  return { end, kind: "l", node };
}

function listItem(lines, depth) {
  const children = rendered(lines, depth + 1);
  // Without blank lines in it, an item is a line and not a paragraph.
  const isTight = !lines.some(isBlank) || lines.every((line, index) => index === 0 || isBlank(line));
  if (isTight) return element("li", {}, ...children.flatMap((child) => (child.tagName === "P" ? [...child.childNodes] : [child])));
  return element("li", {}, ...children);
}

function isTable(lines, at) {
  return lines[at].includes("|") && (lines[at + 1] ?? "").includes("-") && TABLE_RULE.test(lines[at + 1]) && lines[at + 1].includes("|");
}

function table(lines, at) {
  let end = at + 2;
  while (end < lines.length && lines[end].includes("|")) end += 1;
  const [head, rule, ...body] = lines.slice(at, end).map(cells);
  const aligned = rule.map((cell) => (cell.endsWith(":") ? (cell.startsWith(":") ? "center" : "end") : "start"));
  const row = (tag, texts) =>
    element("tr", {}, ...head.map((_, column) => element(tag, { class: aligned[column] }, ...inline(texts[column] ?? ""))));
  const node = () =>
    element(
      "div",
      { class: "table", tabindex: "0" },
      element(
        "table",
        {},
        element("thead", {}, row("th", head)),
        element("tbody", {}, ...body.map((texts) => row("td", texts))),
      ),
    );
  return { end, kind: "t", node };
}

function cells(line) {
  const text = line.trim().replace(/^\|/, "").replace(/\|$/, "");
  return text.split(/(?<!\\)\|/).map((cell) => cell.trim().replaceAll("\\|", "|"));
}

function beginsBlock(line) {
  return [FENCE, HEADING, RULE, QUOTE, ITEM].some((pattern) => pattern.test(line));
}

function paragraph(lines, at) {
  let end = at + 1;
  while (end < lines.length && !isBlank(lines[end]) && !beginsBlock(lines[end]) && !isTable(lines, end)) end += 1;
  const text = lines.slice(at, end).map((line) => line.trim()).join("\n");
  return { end, kind: "p", node: () => element("p", {}, ...inline(text)) };
}
