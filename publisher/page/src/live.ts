/** What the page knows, kept new. */

import { createContext } from "preact";
import { useContext, useEffect, useRef, useState } from "preact/hooks";
import { load, Refused, Unauthorized, type CatchUp, type Fleet, type Host, type LagHistory, type PrunePlan, type Version } from "./api.ts";
import { listen, type Link, type Message } from "./events.ts";

/** A part of the page: its last answer, and why the last attempt brought none. */
export interface Part<T> {
  value: T | null;
  problem: Refused | null;
}

export interface Shown {
  fleet: Fleet | null;
  /** When `fleet` came, by this machine's clock, ms. */
  came: number;
  link: Link;
  versions: Part<{ versions: Version[] }>;
  lag: Part<LagHistory>;
  catchUp: Part<CatchUp>;
  plan: Part<PrunePlan>;
}

const EMPTY = { value: null, problem: null };
const START: Shown = {
  fleet: null,
  came: 0,
  link: { state: "connecting" },
  versions: EMPTY,
  lag: EMPTY,
  catchUp: EMPTY,
  plan: EMPTY,
};
const PARTS = { versions: "v1/versions?limit=200", lag: "v1/lag-history", catchUp: "v1/catch-up", plan: "v1/prune-plan" } as const;
type PartName = keyof typeof PARTS;

/** Costs and plans change with the clock and the hosts too, not only with versions. */
const PARTS_EVERY_MS = 30_000;

/** `refused` is called when the publisher asks for another token than `token`. */
export function useLive(token: string | null, refused: () => void): Shown {
  const [shown, setShown] = useState(START);
  const onRefused = useRef(refused);
  onRefused.current = refused;

  useEffect(() => {
    const stop = new AbortController();
    const set = (some: Partial<Shown>) => setShown((before) => ({ ...before, ...some }));
    const reload = () => loadParts(token, stop.signal, set).catch(() => onRefused.current());
    const message = ({ event, data }: Message) => {
      if (event === "fleet") set({ fleet: JSON.parse(data) as Fleet, came: Date.now() });
      if (event === "versions") void reload();
    };
    const link = (now: Link) => {
      set({ link: now });
      if (now.state === "live") void reload();
    };
    const timer = setInterval(() => void reload(), PARTS_EVERY_MS);
    listen("v1/events", token, { message, link }, stop.signal).catch(() => onRefused.current());
    return () => (clearInterval(timer), stop.abort());
  }, [token]);
  return shown;
}

/** Throws Unauthorized. */
async function loadParts(
  token: string | null,
  signal: AbortSignal,
  set: (some: Partial<Shown>) => void,
): Promise<void> {
  await Promise.all((Object.keys(PARTS) as PartName[]).map((name) => loadPart(name, token, signal, set)));
}

async function loadPart(
  name: PartName,
  token: string | null,
  signal: AbortSignal,
  set: (some: Partial<Shown>) => void,
): Promise<void> {
  try {
    set({ [name]: { value: await load(PARTS[name], token, signal), problem: null } });
  } catch (error) {
    if (error instanceof Unauthorized) throw error;
    // Without a connection the head of the page says so; the last figures stay.
    if (error instanceof Refused) set({ [name]: { value: null, problem: error } });
  }
}

/** What requests are sent with; null where the publisher asks for none. */
export const Token = createContext<string | null>(null);

/** The host with its last updates, asked for where the fleet came without them; again after each update. */
export function useWhole(host: Host, fleetHasUpdates: boolean): Host {
  const token = useContext(Token);
  const [whole, setWhole] = useState<Host | null>(null);
  useEffect(() => {
    if (fleetHasUpdates) return;
    const stop = new AbortController();
    const path = `v1/hosts/${encodeURIComponent(host.key)}`;
    // Until it comes the host is shown as it is known; the connection's state stands at the head of the page.
    load<Host>(path, token, stop.signal).then(setWhole, () => undefined);
    return () => stop.abort();
  }, [host.key, host.local_version, host.served_version, fleetHasUpdates, token]);
  return fleetHasUpdates || whole?.key !== host.key ? host : { ...host, updates: whole.updates };
}

/** Milliseconds of this machine's clock, new every second. */
export function useNow(): number {
  const [now, setNow] = useState(Date.now());
  useEffect(() => {
    const timer = setInterval(() => setNow(Date.now()), 1000);
    return () => clearInterval(timer);
  }, []);
  return now;
}
