import { Fragment } from "preact";
import { useEffect, useState } from "preact/hooks";
import { STANDINGS, type Fleet, type Host } from "./api.ts";
import { Badge } from "./standing.tsx";
import { FIRST_LOOK, hashOf, kinds, lookOf, PAGE_ROWS, pageOf, select, traits, troubleOf, type Column, type Look, type Traits, type Trouble } from "./fleet.ts";
import { age, bytes, count, seconds, version } from "./format.ts";
import { HostDetail } from "./host_detail.tsx";
import { useNow } from "./live.ts";
import { Remedy } from "./remedy.tsx";
import { total } from "./phases.tsx";

type Turn = (some: Partial<Look>) => void;

const HEADINGS: [Column, string][] = [
  ["host", "Host"],
  ["standing", "State"],
  ["served", "Serves"],
  ["local", "Local"],
  ["lag", "Lag"],
  ["heard", "Heard"],
];

/** Columns that nobody sorts by. */
function more(all: Traits): string[] {
  return all.updates ? ["Engines", "Last update"] : ["Engines"];
}

export function FleetPart({ fleet, came, live }: { fleet: Fleet | null; came: number; live: boolean }) {
  const [look, turn] = useLook();
  return (
    <section id="hosts" tabIndex={-1} aria-labelledby="hosts-title">
      <h2 id="hosts-title">Hosts</h2>
      {fleet === null && <p class="none">Waiting for the publisher.</p>}
      {fleet !== null && fleet.hosts.length === 0 && (
        <p class="none">
          No host has reported yet. <Remedy text={`start one: \`weightcast subscriber run --channel ${fleet.channel} --local DIRECTORY --base BASE\``} />
        </p>
      )}
      {fleet !== null && fleet.hosts.length > 0 && <Hosts fleet={fleet} came={came} live={live} look={look} turn={turn} />}
    </section>
  );
}

/** The look, kept in the address. Any change but of the page goes back to the first page. */
function useLook(): [Look, Turn] {
  const [look, setLook] = useState(() => lookOf(location.hash));
  useEffect(() => {
    const follow = () => setLook(lookOf(location.hash));
    addEventListener("hashchange", follow);
    return () => removeEventListener("hashchange", follow);
  }, []);
  const turn = (some: Partial<Look>) => {
    const next = { ...look, ...("host" in some ? {} : { page: FIRST_LOOK.page }), ...some };
    history.replaceState(null, "", hashOf(next) === "" ? location.pathname : `#${hashOf(next)}`);
    setLook(next);
  };
  return [look, turn];
}

interface Showing {
  fleet: Fleet;
  came: number;
  live: boolean;
  look: Look;
  turn: Turn;
}

function Hosts({ fleet, came, live, look, turn }: Showing) {
  const found = select(fleet, look);
  const all = traits(fleet);
  const page = pageOf(found.length, look.page);
  const rows = found.slice(page * PAGE_ROWS, (page + 1) * PAGE_ROWS);
  const silent = Math.max(0, useNow() - came) / 1000;
  return (
    <>
      <Filters fleet={fleet} look={look} turn={turn} found={found.length} />
      <Kinds fleet={fleet} look={look} turn={turn} />
      <div class="wide" data-live={live}>
        <table class="hosts">
          <caption class="unseen">Hosts as they report themselves, press a column to sort by it</caption>
          <Headings look={look} turn={turn} more={more(all)} />
          <tbody>
            {rows.map((host) => (
              <Row key={host.key} host={host} all={all} silent={silent} open={host.key === look.host} turn={turn} />
            ))}
          </tbody>
        </table>
      </div>
      {found.length === 0 && <p class="none">No host is like that.</p>}
      <Pages rows={found.length} page={page} turn={turn} />
    </>
  );
}

function Filters({ fleet, look, turn, found }: { fleet: Fleet; look: Look; turn: Turn; found: number }) {
  return (
    <div class="filters">
      <div role="group" aria-label="Show hosts that are" class="chips">
        <button type="button" aria-pressed={look.only === null} onClick={() => turn({ only: null })}>
          All <b>{count(fleet.hosts.length)}</b>
        </button>
        {STANDINGS.map((each) => (
          <button key={each} type="button" data-only={each} aria-pressed={look.only === each} onClick={() => turn({ only: each })}>
            <Badge standing={each} /> <b>{count(fleet.counts[each])}</b>
          </button>
        ))}
      </div>
      <label class="find">
        <span class="unseen">Find hosts</span>
        <input type="search" placeholder="Find host, path, error" value={look.words} onInput={(event) => turn({ words: event.currentTarget.value })} />
      </label>
      <p class="unseen" role="status">
        {look.words === "" && look.only === null && look.kind === null ? "" : `${count(found)} of ${count(fleet.hosts.length)} hosts shown`}
      </p>
    </div>
  );
}

/** One press shows the hosts with the same trouble. */
function Kinds({ fleet, look, turn }: { fleet: Fleet; look: Look; turn: Turn }) {
  const found = kinds(fleet);
  if (found.length === 0) return null;
  return (
    <div role="group" aria-label="Show hosts with the same error" class="chips kinds">
      {found.map(([kind, hosts]) => (
        <button key={kind} type="button" data-kind={kind} aria-pressed={look.kind === kind} onClick={() => turn({ kind: look.kind === kind ? null : kind })}>
          <b>{count(hosts)} hosts</b> {kind}
        </button>
      ))}
    </div>
  );
}

function Headings({ look, turn, more }: { look: Look; turn: Turn; more: string[] }) {
  return (
    <thead>
      <tr>
        {HEADINGS.map(([column, text]) => {
          const here = look.sort === column;
          return (
            <th key={column} scope="col" class={column} aria-sort={here ? (look.descending ? "descending" : "ascending") : "none"}>
              <button type="button" onClick={() => turn({ sort: column, descending: here && !look.descending })}>
                {text}
                <span class="arrow" aria-hidden="true">
                  {here ? (look.descending ? "↓" : "↑") : ""}
                </span>
              </button>
            </th>
          );
        })}
        {more.map((text) => (
          <th key={text} scope="col" class="more">
            {text}
          </th>
        ))}
      </tr>
    </thead>
  );
}

interface RowOf {
  host: Host;
  all: Traits;
  silent: number;
  open: boolean;
  turn: Turn;
}

function Row({ host, all, silent, open, turn }: RowOf) {
  const detail = `detail-${host.key}`;
  const trouble = troubleOf(host, all.runId);
  const width = HEADINGS.length + more(all).length;
  return (
    <Fragment>
      <tr class={`host ${host.standing}`} data-host={host.host} data-key={host.key} data-local={host.local}>
        <th scope="row">
          <button
            type="button"
            id={`open-${host.key}`}
            aria-expanded={open}
            aria-controls={open ? detail : undefined}
            onClick={() => turn({ host: open ? null : host.key })}
          >
            <span class="turn" aria-hidden="true" />
            {host.host}
          </button>
          {all.shared.has(host.host) && <small class="path">{host.local}</small>}
        </th>
        <td class="standing">
          <Badge standing={host.standing} atTarget={host.lag === 0} />
          <small>{doing(host)}</small>
        </td>
        <td class="served">{version(host.served_version)}</td>
        <td class="local">{version(host.local_version)}</td>
        <td class="lag">{count(host.lag)}</td>
        <td class="heard">{age(host.heard_seconds_ago === null ? null : host.heard_seconds_ago + silent)}</td>
        <td class="more">{engines(host)}</td>
        {all.updates && <td class="more">{lastUpdate(host)}</td>}
      </tr>
      {trouble !== null && <TroubleRow host={host} trouble={trouble} width={width} />}
      {open && (
        <tr class="detail" id={detail}>
          <td colSpan={width} onKeyDown={(event) => event.key === "Escape" && close(host, turn)}>
            <HostDetail host={host} fleetHasUpdates={all.updates} />
          </td>
        </tr>
      )}
    </Fragment>
  );
}

function close(host: Host, turn: Turn): void {
  document.getElementById(`open-${host.key}`)?.focus();
  turn({ host: null });
}

function TroubleRow({ host, trouble, width }: { host: Host; trouble: Trouble; width: number }) {
  return (
    <tr class="trouble" data-trouble={host.host}>
      <td colSpan={width}>
        <span class="unseen">{host.host}: </span>
        <span class="error">{trouble.error}</span>
        {trouble.remedy !== "" && <Remedy text={trouble.remedy} />}
      </td>
    </tr>
  );
}

function Pages({ rows, page, turn }: { rows: number; page: number; turn: Turn }) {
  if (rows <= PAGE_ROWS) return null;
  const [first, last] = [page * PAGE_ROWS + 1, Math.min(rows, (page + 1) * PAGE_ROWS)];
  return (
    <nav class="pages" aria-label="Pages of hosts">
      <button type="button" disabled={page === 0} onClick={() => turn({ page: page - 1 })}>
        Previous
      </button>
      <span role="status">
        {count(first)}–{count(last)} of {count(rows)}
      </span>
      <button type="button" disabled={last === rows} onClick={() => turn({ page: page + 1 })}>
        Next
      </button>
    </nav>
  );
}

/** What the state adds to the standing. */
function doing(host: Host): string {
  const engine = host.engines.find(({ state }) => state === "silent" || (state !== "serving" && host.lag === 0));
  if (engine !== undefined && host.presence === "live" && host.standing !== "stopped") return `engine ${engine.state === "silent" ? "not serving" : engine.state}`;
  const unsaid = [host.standing, "idle", host.presence === "live" ? "ready" : ""];
  const words = [host.state, host.phase].filter((word, at, all) => !unsaid.includes(word) && all.indexOf(word) === at);
  const said = words.join(" ").trim();
  return host.presence === "live" || host.standing === "stopped" || said === "" ? said : `last said ${said}`;
}

function engines(host: Host): string {
  const adapters = host.adapters.map((each) => `${each.name.replace(/^adapter\//, "")}@${each.version ?? "–"}`);
  return [enginesOf(host), ...adapters].join(", ");
}

function enginesOf(host: Host): string {
  if (host.engines.length === 0) return "no engine";
  const serving = host.engines.filter((engine) => engine.state === "serving").length;
  const now = host.presence === "live" && host.standing !== "stopped";
  return now ? `${serving} of ${host.engines.length} serving` : `not known now, last ${serving} of ${host.engines.length}`;
}

function lastUpdate(host: Host): string {
  const last = host.updates[0];
  return last === undefined ? "–" : `${seconds(total(last))} · ${bytes(last.bytes)}`;
}
