// The server's API, as far as the page uses it. Paths are relative, so the page also works below a proxy's prefix.

const KEY = "noria.key";
let key = read();

function read() {
  try {
    return sessionStorage.getItem(KEY) ?? "";
  } catch {
    return ""; // the browser keeps nothing for this site
  }
}

export const getKey = () => key;

/** Kept until the tab is closed. */
export function setKey(value) {
  key = value;
  try {
    sessionStorage.setItem(KEY, value);
  } catch {
    // it then lasts as long as the page
  }
}

/** What the server said was wrong. status: 0 when it could not be reached or had already begun to answer. */
export class ApiError extends Error {
  constructor(message, status) {
    super(message);
    this.status = status;
  }
}

async function request(path, options = {}) {
  const headers = new Headers(options.headers);
  if (key) headers.set("Authorization", `Bearer ${key}`);
  let response;
  try {
    response = await fetch(new URL(path, document.baseURI), { cache: "no-store", ...options, headers });
  } catch (error) {
    if (error.name === "AbortError") throw error;
    throw new ApiError("The server cannot be reached.", 0);
  }
  if (!response.ok) throw new ApiError(await reason(response), response.status);
  return response;
}

async function reason(response) {
  const text = await response.text();
  try {
    return JSON.parse(text).error.message;
  } catch {
    return text.slice(0, 300) || `The server answered ${response.status} ${response.statusText}`;
  }
}

/** [{id, max_model_len}, ...] */
export async function getModels() {
  return (await (await request("v1/models")).json()).data;
}

/** {ready, status}: whether requests are taken, and why not. */
export async function getReadiness() {
  try {
    const response = await fetch(new URL("ready", document.baseURI), { cache: "no-store" });
    const { status } = await response.json();
    return { ready: response.ok, status };
  } catch {
    return { ready: false, status: "not reachable" };
  }
}

/** The sums over all labels by name, without the prefix noria: */
export async function getMetrics() {
  const text = await (await request("metrics")).text();
  const values = new Map();
  for (const [, name, value] of text.matchAll(/^noria:(\w+)(?:\{.*\})? (\S+)$/gm)) {
    values.set(name, (values.get(name) ?? 0) + Number(value));
  }
  return values;
}

/** Yields the chunks of a streamed answer. Aborting `signal` ends the request, and with it the server's work on it. */
export async function* streamChat(body, signal) {
  const response = await request("v1/chat/completions", {
    method: "POST",
    headers: { "Content-Type": "application/json" },
    body: JSON.stringify({ ...body, stream: true, stream_options: { include_usage: true } }),
    signal,
  });
  for await (const data of events(response.body)) {
    if (data === "[DONE]") return;
    const chunk = JSON.parse(data);
    if (chunk.error) throw new ApiError(chunk.error.message, 0);
    yield chunk;
  }
  throw new ApiError("The connection broke before the answer was whole.", 0);
}

/** Server-sent events: what follows "data:" in each. */
async function* events(stream) {
  const reader = stream.pipeThrough(new TextDecoderStream()).getReader();
  let buffer = "";
  try {
    for (;;) {
      const { done, value } = await reader.read();
      if (done) return;
      buffer += value;
      const lines = buffer.split(/\r?\n/);
      buffer = lines.pop();
      for (const line of lines) if (line.startsWith("data:")) yield line.slice(5).trim();
    }
  } catch (error) {
    if (error.name === "AbortError") throw error;
    throw new ApiError("The connection broke before the answer was whole.", 0);
  } finally {
    reader.cancel().catch(() => {});
  }
}
