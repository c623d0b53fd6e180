/** Server-sent events over fetch: an EventSource cannot send a token. */

import { open, Refused, Unauthorized } from "./api.ts";

export interface Message {
  event: string;
  data: string;
}

/** Takes the stream in pieces of any size (WHATWG HTML, 9.2.6, as far as the publisher uses it). */
export class Parser {
  private rest = "";
  private event = "";
  private data: string[] = [];

  push(text: string): Message[] {
    const lines = (this.rest + text).split("\n");
    this.rest = lines.pop() ?? "";
    return lines.flatMap((line) => this.line(line.replace(/\r$/, "")));
  }

  private line(line: string): Message[] {
    if (line === "") return this.end();
    const [, name, value = ""] = /^([^:]*):? ?(.*)$/s.exec(line) ?? [];
    if (name === "event") this.event = value;
    if (name === "data") this.data.push(value);
    return [];
  }

  private end(): Message[] {
    const message = { event: this.event || "message", data: this.data.join("\n") };
    const found = this.data.length > 0 ? [message] : [];
    this.event = "";
    this.data = [];
    return found;
  }
}

export type Link = { state: "connecting" } | { state: "live" } | { state: "lost"; why: string; retryAt: number };

export interface Listener {
  message(message: Message): void;
  link(link: Link): void;
}

const FIRST_PAUSE_MS = 500;
const LONGEST_PAUSE_MS = 10_000;
/** The publisher sends a comment every 15 s: what is silent for longer is a dead connection. */
const SILENCE_MS = 40_000;

/** Listens until `signal` aborts, over any number of connections. Throws Unauthorized. */
export async function listen(
  path: string,
  token: string | null,
  listener: Listener,
  signal: AbortSignal,
): Promise<void> {
  let failures = 0;
  while (!signal.aborted) {
    const why = await connection(path, token, signal, listener, () => (failures = 0));
    if (signal.aborted) return;
    const pause = Math.min(FIRST_PAUSE_MS * 2 ** failures++, LONGEST_PAUSE_MS) * (0.8 + 0.4 * Math.random());
    listener.link({ state: "lost", why, retryAt: Date.now() + pause });
    await delay(pause, signal);
  }
}

/** One connection to its end; the answer is why it ended. */
async function connection(
  path: string,
  token: string | null,
  signal: AbortSignal,
  listener: Listener,
  heard: () => void,
): Promise<string> {
  const closing = new AbortController();
  const close = () => closing.abort();
  signal.addEventListener("abort", close);
  let watch = setTimeout(close, SILENCE_MS);
  try {
    const answer = await open(path, token, closing.signal);
    listener.link({ state: "live" });
    const [parser, decoder, reader] = [new Parser(), new TextDecoder(), answer.body!.getReader()];
    for (;;) {
      const { done, value } = await reader.read();
      if (done) return "the publisher closed the connection";
      clearTimeout(watch);
      watch = setTimeout(close, SILENCE_MS);
      heard();
      parser.push(decoder.decode(value, { stream: true })).forEach((message) => listener.message(message));
    }
  } catch (error) {
    return reason(error, closing.signal.aborted);
  } finally {
    clearTimeout(watch);
    signal.removeEventListener("abort", close);
  }
}

function reason(error: unknown, silent: boolean): string {
  if (error instanceof Unauthorized) throw error;
  if (silent) return "nothing was heard from the publisher";
  // What fetch throws for a connection that failed says nothing that helps.
  return error instanceof Refused ? error.message : "the publisher does not answer";
}

function delay(milliseconds: number, signal: AbortSignal): Promise<void> {
  return new Promise((done) => {
    const timer = setTimeout(done, milliseconds);
    signal.addEventListener("abort", () => (clearTimeout(timer), done()), { once: true });
  });
}
