// Markdown inside a line: code, bold, italic, struck out, links. Every pass over the text is linear, whatever it holds:
// a mark that was looked for once and not found is not looked for again.

import { element } from "./dom.js";

const MAX_DEPTH = 6;
const ESCAPED = /[!-/:-@[-`{-~]/;
const LINK = /\[([^[\]\n]{1,500})\]\(\s*<?(https?:\/\/[^\s<>()]*(?:\([^\s<>()]*\)[^\s<>()]*)*)>?(?:\s+"[^"\n]*")?\s*\)/iy;
const BARE_LINK = /https?:\/\/[^\s<>"'`*\])]+/iy;
const MARKS = [
  ["**", "strong"],
  ["__", "strong"],
  ["~~", "del"],
  ["*", "em"],
  ["_", "em"],
];
const isSpace = (char) => char === undefined || /\s/.test(char);
const isWord = (char) => char !== undefined && /[\p{L}\p{N}_]/u.test(char);

/** A list of nodes. */
export function inline(text, depth = 0) {
  const nodes = [];
  const dead = new Set(); // marks without an end
  let plain = "";
  let at = 0;
  const put = (node, length) => {
    if (plain) nodes.push(document.createTextNode(plain));
    plain = "";
    nodes.push(node);
    at += length;
  };
  while (at < text.length) {
    const found = special(text, at, depth, dead);
    if (found?.node) {
      put(found.node, found.length);
    } else {
      plain += found?.plain ?? text[at];
      at += found?.length ?? 1;
    }
  }
  if (plain) nodes.push(document.createTextNode(plain));
  return nodes;
}

/** {node or plain, length} of what begins at `at`; nothing for an ordinary character. */
function special(text, at, depth, dead) {
  switch (text[at]) {
    case "\n":
      return { node: element("br"), length: 1 };
    case "\\":
      return ESCAPED.test(text[at + 1] ?? "") ? { plain: text[at + 1], length: 2 } : undefined;
    case "`":
      return code(text, at, dead);
    case "[":
      return link(text, at, depth);
    case "h":
    case "H":
      return isWord(text[at - 1]) ? undefined : bareLink(text, at);
    case "*":
    case "_":
    case "~":
      return depth < MAX_DEPTH ? emphasis(text, at, depth, dead) : undefined;
  }
  return undefined;
}

function code(text, at, dead) {
  const length = runLength(text, at);
  const end = endOfCode(text, at, length, dead);
  if (end < 0) return { plain: text.slice(at, at + length), length };
  const content = text.slice(at + length, end).replaceAll("\n", " ");
  const padded = content.startsWith(" ") && content.endsWith(" ") && content.trim() !== "";
  return { node: element("code", { text: padded ? content.slice(1, -1) : content }), length: end + length - at };
}

function runLength(text, at) {
  let end = at;
  while (text[end] === "`") end += 1;
  return end - at;
}

/** Where the next run of exactly `length` backticks begins; -1 when there is none. */
function endOfCode(text, at, length, dead) {
  const mark = "`".repeat(length);
  if (dead.has(mark)) return -1;
  for (let end = text.indexOf(mark, at + length); end >= 0; ) {
    const run = runLength(text, end);
    if (run === length) return end;
    end = text.indexOf(mark, end + run);
  }
  dead.add(mark);
  return -1;
}

function link(text, at, depth) {
  LINK.lastIndex = at;
  const [all, label, address] = LINK.exec(text) ?? [];
  const href = all && webAddress(address);
  return href ? { node: anchor(href, inline(label, depth + 1)), length: all.length } : undefined;
}

function bareLink(text, at) {
  BARE_LINK.lastIndex = at;
  const address = BARE_LINK.exec(text)?.[0].replace(/[.,;:!?]+$/, "");
  const href = address && webAddress(address);
  return href ? { node: anchor(href, [address]), length: address.length } : undefined;
}

/** The address in full when it is one of the web; null for any other scheme and for nonsense. */
export function webAddress(text) {
  if (!URL.canParse(text)) return null;
  const { protocol, href } = new URL(text);
  return protocol === "https:" || protocol === "http:" ? href : null;
}

function anchor(href, children) {
  return element("a", { href, target: "_blank", rel: "noopener noreferrer" }, ...children);
}

function emphasis(text, at, depth, dead) {
  const [mark, tag] = MARKS.find(([each]) => text.startsWith(each, at)) ?? [];
  if (!mark || dead.has(mark)) return undefined;
  const begin = at + mark.length;
  if (isSpace(text[begin]) || (mark[0] === "_" && isWord(text[at - 1]))) return { plain: mark, length: mark.length };
  const end = endOfEmphasis(text, begin, mark);
  if (end < 0) {
    dead.add(mark);
    return { plain: mark, length: mark.length };
  }
  const content = inline(text.slice(begin, end), depth + 1);
  return { node: element(tag, {}, ...content), length: end + mark.length - at };
}

function endOfEmphasis(text, begin, mark) {
  const dead = new Set();
  for (let at = begin; at < text.length; at += 1) {
    if (text[at] === "\\") {
      at += 1;
    } else if (text[at] === "`") {
      const length = runLength(text, at);
      const end = endOfCode(text, at, length, dead);
      at = (end < 0 ? at : end) + length - 1;
    } else if (text.startsWith(mark, at)) {
      if (mark.length === 1 && text[at + 1] === mark) {
        at += 1; // a pair is another mark's
      } else if (at > begin && !isSpace(text[at - 1]) && !(mark[0] === "_" && isWord(text[at + mark.length]))) {
        while (mark.length === 2 && text[at + 2] === mark[0]) at += 1; // of three, the last two
        return at;
      }
    }
  }
  return -1;
}
