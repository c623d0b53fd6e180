/** What the publisher answers. Times are unix seconds of its clock, sizes bytes, durations seconds. */

/** In their order. An engine answers no requests from `pause` on. */
export const PHASES = [
  ...(["plan", "seed", "fetch", "stage", "offer", "group", "lock", "patch"] as const),
  ...(["pause", "reload", "read_back", "resume"] as const),
];
export type Phase = (typeof PHASES)[number];

export const PAUSED: ReadonlySet<Phase> = new Set<Phase>(["pause", "reload", "read_back", "resume"]);

export interface Update {
  version: number;
  began: number;
  kind?: string;
  /** `pause_total`: of the engine paused longest. */
  seconds: Partial<Record<Phase | "total" | "pause_total", number>>;
  bytes: number;
  outcome: string;
}

export interface Engine {
  name: string;
  kind: string;
  state: string;
  version: number | null;
  confirmed_by: string;
}

/** Worst first; hosts that were stopped on request are last. `ready` is shown as up to date. */
export const STANDINGS = ["lost", "failed", "stale", "behind", "ready", "stopped"] as const;
export type Standing = (typeof STANDINGS)[number];

/** An adapter of the run on a host; `version`: the newest that its engines have loaded. */
export interface Adapter {
  name: string;
  version: number | null;
  target: number | null;
  main_version: number | null;
  state: string;
  error: string;
}

export interface Host {
  key: string;
  host: string;
  local: string;
  run_id: string;
  presence: "live" | "stale" | "lost";
  /** null where the reader cannot know. */
  heard_seconds_ago: number | null;
  standing: Standing;
  state: string;
  ready: boolean;
  phase: string;
  local_version: number | null;
  served_version: number | null;
  target: string;
  target_version: number | null;
  lag: number | null;
  last_error: string;
  remedy: string;
  retries: number;
  bytes: Record<string, number>;
  engines: Engine[];
  software: string;
  clock_offset_seconds: number | null;
  /** URL of its gate, or empty. */
  gate: string;
  /** At its gate: under_way, waiting, closed (1: it admits none), and outcomes since its start. */
  requests: Record<string, number>;
  /** Of its gate's answers by version, the newest ones. */
  tokens: Record<string, number>;
  adapters: Adapter[];
  /** Newest first; none in large fleets, where they are asked for host by host. */
  updates: Update[];
}

export interface LagCount {
  lag: number;
  hosts: number;
}

/** Watched checkpoints by what became of them, e.g. waiting, refused. */
export type Inbox = Record<string, number>;

export interface RefusedCheckpoint {
  source: string;
  message: string;
  remedy: string;
  seconds_ago: number | null;
}

export interface Publisher {
  ready: boolean;
  reasons: string[];
  publishing: string;
  queue: number;
  inbox: Inbox;
  held: string;
  /** Checkpoints that wait while publishing is held. */
  waiting?: string[];
  /** What somebody should know though the publisher works. */
  notes: string[];
  last_refused: RefusedCheckpoint | null;
  refused_since_version: boolean;
}

export type Level = "good" | "warning" | "bad";

export interface Fleet {
  now: number;
  channel: string;
  run_id: string | null;
  latest: number | null;
  hosts: Host[];
  counts: Record<Standing, number>;
  lag: LagCount[];
  latest_age_seconds: number | null;
  publisher: Publisher | null;
  verdict: { level: Level; text: string };
}

export interface Version {
  version: number;
  step: number | null;
  created: number | null;
  bytes: number;
  changed: number | null;
  elements: number | null;
  density: number | null;
  ratio: number | null;
  publish_seconds: number | null;
  /** From `created` until half of the hosts served it; null: no host reports that any more. */
  served_seconds?: number | null;
  /** The longest that it paused an engine; null as above. */
  pause_seconds?: number | null;
  kept: boolean;
  tags: string[];
  anchor: boolean;
  skips: number[];
  /** The version before it with the same weights: mostly what a rollback went back to. */
  same_as?: number | null;
}

/** Hosts at one moment. */
export interface LagSample {
  at: number;
  /** Of those that neither stopped nor are lost, by versions behind: 0, 1, 2-3, 4-15, 16-63, 64+, unknown. */
  behind: Record<string, number>;
  lost: number;
  /** Why publishing was held, or empty. */
  held: string;
}

/** The last hour, oldest first. */
export interface LagHistory {
  samples: LagSample[];
}

export interface CatchUpRow {
  lag: number;
  bytes: number;
  steps: string[];
  seconds: number | null;
}

export interface Joiner {
  bytes: number | null;
  seconds: number | null;
  without_base: { bytes: number } | null;
}

export interface CatchUp {
  rows: CatchUpRow[];
  joiner: Joiner;
}

export interface Planned {
  version: number;
  bytes: number;
  why: string;
}

export interface PrunePlan {
  horizon: number | null;
  /** Why nothing would go, or empty. */
  why_not: string;
  remove: Planned[];
  keep: Planned[];
}

/** The publisher asks for a token, or for another one. */
export class Unauthorized extends Error {}

/** An answer that is not the one asked for. `remedy` may be empty. */
export class Refused extends Error {
  constructor(
    message: string,
    readonly remedy: string,
  ) {
    super(message);
  }
}

export async function open(path: string, token: string | null, signal: AbortSignal): Promise<Response> {
  const headers: Record<string, string> = token === null ? {} : { Authorization: `Bearer ${token}` };
  const answer = await fetch(path, { headers, signal, cache: "no-store", credentials: "omit" });
  if (answer.status === 401) throw new Unauthorized("this publisher asks for a token");
  if (!answer.ok) throw await refusal(answer);
  return answer;
}

/** Deletes the report of a host that stopped or is lost. */
export async function forget(key: string, token: string | null): Promise<void> {
  const headers: Record<string, string> = token === null ? {} : { Authorization: `Bearer ${token}` };
  const answer = await fetch(`v1/hosts/${encodeURIComponent(key)}`, { method: "DELETE", headers, credentials: "omit" });
  if (!answer.ok) throw await refusal(answer);
}

export async function load<T>(path: string, token: string | null, signal: AbortSignal): Promise<T> {
  const answer = await open(path, token, signal);
  return (await answer.json()) as T;
}

async function refusal(answer: Response): Promise<Refused> {
  try {
    const { message, remedy } = (await answer.json()) as { message?: string; remedy?: string };
    return new Refused(message ?? answer.statusText, remedy ?? "");
  } catch {
    return new Refused(`HTTP ${answer.status}`, "");
  }
}
