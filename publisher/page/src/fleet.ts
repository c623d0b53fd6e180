/** Rules of the fleet table: what a host counts as, what is shown, in which order. */

import { STANDINGS, type Fleet, type Host, type Standing } from "./api.ts";

export const COLUMNS = ["host", "standing", "served", "local", "lag", "heard"] as const;
export type Column = (typeof COLUMNS)[number];

export const PAGE_ROWS = 25;

/** What the reader asked for; kept in the address, so that it survives a reload and can be sent to a colleague. */
export interface Look {
  words: string;
  only: Standing | null;
  /** One kind of trouble, as `kindOf` names it. */
  kind: string | null;
  sort: Column;
  descending: boolean;
  page: number;
  host: string | null;
}

export const FIRST_LOOK: Look = { words: "", only: null, kind: null, sort: "standing", descending: false, page: 0, host: null };

export function select({ hosts, run_id: runId }: Fleet, look: Look): Host[] {
  const words = look.words.toLowerCase().split(/\s+/).filter(Boolean);
  const alike = (host: Host) => look.kind === null || kindOf(host, runId) === look.kind;
  const found = hosts.filter((host) => isOf(host, look.only) && alike(host) && words.every((word) => says(host, word)));
  return found.sort((a, b) => compare(a, b, look.sort) * (look.descending ? -1 : 1) || byName(a, b));
}

/** What the table says of all hosts at once. */
export interface Traits {
  runId: string | null;
  /** Large fleets come without. */
  updates: boolean;
  /** Names that several hosts have: their directories tell them apart. */
  shared: ReadonlySet<string>;
}

export function traits(fleet: Fleet): Traits {
  const [seen, shared] = [new Set<string>(), new Set<string>()];
  for (const { host } of fleet.hosts) (seen.has(host) ? shared : seen).add(host);
  return { runId: fleet.run_id, updates: fleet.hosts.some((host) => host.updates.length > 0), shared };
}

/** What is wrong with a host, and what to do. */
export interface Trouble {
  error: string;
  remedy: string;
}

export function troubleOf(host: Host, runId: string | null): Trouble | null {
  if (host.standing === "stopped") return null;
  if (host.last_error !== "") return { error: host.last_error, remedy: host.remedy };
  if (runId !== null && host.run_id !== "" && host.run_id !== runId) return strange(host);
  return engineTrouble(host);
}

function strange({ run_id: run }: Host): Trouble {
  return { error: `Follows another run, ${run}.`, remedy: "give it this run's channel, or a local directory of its own" };
}

/** States of an engine that somebody has to look at; what is said of it, and the remedy. */
const ENGINE_TROUBLE: Record<string, [string, string]> = {
  failed: ["has failed", "restart it; it is reloaded as soon as it answers"],
  silent: ["does not answer", "check that it runs, and that the subscriber's --engine names its address"],
  suspect: ["is paused: its weights are unknown", "wait until it is reloaded; if this stays, restart it"],
  paused: ["is paused externally", "resume it; requests block until then"],
};

function engineTrouble(host: Host): Trouble | null {
  for (const [state, [says, remedy]] of Object.entries(ENGINE_TROUBLE)) {
    const engine = host.engines.find((each) => each.state === state);
    if (engine !== undefined) return { error: `Engine ${engine.name} ${says}.`, remedy };
  }
  return null;
}

/** Its error without what differs from host to host: paths, addresses, numbers. */
export function kindOf(host: Host, runId: string | null): string | null {
  const trouble = troubleOf(host, runId);
  return trouble === null ? null : trouble.error.replace(/\S*[\d/]\S*( \S*[\d/]\S*)*/g, "…").slice(0, 80);
}

const MOST_KINDS = 5;

/** Kinds of trouble that several hosts share, those of most hosts first. */
export function kinds({ hosts, run_id: runId }: Fleet): [kind: string, hosts: number][] {
  const found = new Map<string, number>();
  for (const host of hosts) {
    const kind = kindOf(host, runId);
    if (kind !== null) found.set(kind, (found.get(kind) ?? 0) + 1);
  }
  return [...found].filter(([, hosts]) => hosts > 1).sort((a, b) => b[1] - a[1]).slice(0, MOST_KINDS);
}

/** The page that is shown of `rows`: the asked one, or the last there is. */
export function pageOf(rows: number, asked: number): number {
  return Math.max(0, Math.min(asked, Math.ceil(rows / PAGE_ROWS) - 1));
}

function isOf(host: Host, only: Standing | null): boolean {
  return only === null || host.standing === only;
}

function says(host: Host, word: string): boolean {
  const texts = [host.host, host.local, host.standing, host.state, host.phase, host.target, host.last_error];
  return [...texts, ...host.engines.flatMap(({ name, kind, state }) => [name, kind, state])].some((text) =>
    text.toLowerCase().includes(word),
  );
}

function compare(a: Host, b: Host, column: Column): number {
  if (column === "host") return byName(a, b);
  if (column === "standing") return severity(a) - severity(b) || number(b.lag) - number(a.lag);
  return number(figure(a, column)) - number(figure(b, column));
}

function figure(host: Host, column: Exclude<Column, "host" | "standing">): number | null {
  const { served_version: served, local_version: local, lag, heard_seconds_ago: heard } = host;
  return { served, local, lag, heard }[column];
}

function number(value: number | null): number {
  return value ?? -1;
}

/** Lost without ever having held a version: mostly a start with wrong settings. */
export function isGhost(host: Host): boolean {
  return host.standing === "lost" && host.local_version === null && host.served_version === null;
}

/** Ghosts are last. */
function severity(host: Host): number {
  return isGhost(host) ? STANDINGS.length : STANDINGS.indexOf(host.standing);
}

const names = new Intl.Collator("en", { numeric: true });

function byName(a: Host, b: Host): number {
  return names.compare(a.host, b.host) || names.compare(a.local, b.local);
}

export function lookOf(hash: string): Look {
  const given = new URLSearchParams(hash.replace(/^#/, ""));
  const sort = COLUMNS.find((column) => column === given.get("sort")) ?? FIRST_LOOK.sort;
  return {
    words: (given.get("find") ?? "").slice(0, 200),
    only: STANDINGS.find((standing) => standing === given.get("only")) ?? null,
    kind: given.get("error"),
    sort,
    descending: given.get("order") === "down",
    page: Math.max(0, Math.trunc(Number(given.get("page") ?? 1)) - 1 || 0),
    host: given.get("host"),
  };
}

export function hashOf(look: Look): string {
  const given = new URLSearchParams();
  if (look.words !== "") given.set("find", look.words);
  if (look.only !== null) given.set("only", look.only);
  if (look.kind !== null) given.set("error", look.kind);
  if (look.sort !== FIRST_LOOK.sort) given.set("sort", look.sort);
  if (look.descending) given.set("order", "down");
  if (look.page > 0) given.set("page", String(look.page + 1));
  if (look.host !== null) given.set("host", look.host);
  return given.toString();
}
