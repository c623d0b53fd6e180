import type { ComponentChildren } from "preact";
import { useEffect } from "preact/hooks";
import { STANDINGS, type Fleet, type Level, type Standing, type Version } from "./api.ts";
import type { Link } from "./events.ts";
import { isGhost } from "./fleet.ts";
import { age, bytes, count, round, seconds, version } from "./format.ts";
import { useNow, type Shown } from "./live.ts";
import { PublisherStrip } from "./publisher.tsx";

export function Head({ shown }: { shown: Shown }) {
  const { fleet, link, came } = shown;
  const versions = shown.versions.value?.versions ?? [];
  const newest = versions[0];
  const level = link.state === "lost" ? "bad" : fleet?.verdict.level;
  useEffect(() => void (document.title = title(fleet)), [fleet]);
  return (
    <header>
      <div class="bar">
        <h1>weightcast</h1>
        {fleet !== null && (
          <p class="run">
            <span class="path">{fleet.channel}</span>
            {fleet.run_id !== null && <span class="path">run {fleet.run_id}</span>}
          </p>
        )}
        <LinkState link={link} came={came} />
      </div>
      {fleet !== null && (
        <>
          <p class={`verdict ${fleet.hosts.length === 0 && level === "good" ? "" : level}`} role="status" data-level={level}>
            {link.state === "lost" && "Not connected to the publisher. Last known: "}
            {fleet.verdict.text}
          </p>
          <dl class="figures">
            <Latest fleet={fleet} came={came} versions={versions} />
            <Figure name="Hosts up to date" value={count(fleet.counts.ready)} note={`of ${count(running(fleet))}${readyText(fleet)}`} id="ready" level={readyLevel(fleet)} />
            <Figure name="Largest lag" value={count(largestLag(fleet))} note={lagUnit(fleet)} id="largest-lag" level={lagLevel(fleet)} />
            <Figure name="Newest delta" value={bytes(newest?.bytes)} note={newest?.ratio == null ? "" : `1/${round(newest.ratio)} of full`} id="newest" />
          </dl>
          {fleet.publisher !== null && <PublisherStrip publisher={fleet.publisher} channel={fleet.channel} came={came} live={link.state === "live"} />}
        </>
      )}
    </header>
  );
}

interface FigureOf {
  name: string;
  value: string;
  note: ComponentChildren;
  id: string;
  level?: Level | "";
}

function Figure({ name, value, note, id, level = "" }: FigureOf) {
  return (
    <div id={`figure-${id}`} class={level}>
      <dt>{name}</dt>
      <dd>
        <strong>{value}</strong> <span>{note}</span>
      </dd>
    </div>
  );
}

/** How long the newest version has been the newest: a trainer that stalls shows here and nowhere else. */
function Latest({ fleet, came, versions }: { fleet: Fleet; came: number; versions: Version[] }) {
  const silent = Math.max(0, useNow() - came) / 1000;
  const [newest, usual] = [versions[0], usualGap(versions)];
  const step = newest?.version === fleet.latest ? (newest?.step ?? null) : null;
  const parts = [fleet.latest === 0 ? "the base, no version yet" : "", step === null ? "" : `step ${count(step)}`];
  const seconds_ago = fleet.latest_age_seconds === null ? null : fleet.latest_age_seconds + silent;
  if (seconds_ago !== null) parts.push(`${age(seconds_ago)} ago`);
  const late = usual !== null && (seconds_ago ?? 0) > LATE * usual;
  if (newest?.version === fleet.latest && newest?.same_as != null) parts.push(`with the weights of version ${newest.same_as}`);
  if (late) parts.push(`usually every ${seconds(usual)}`);
  return <Figure name="Latest version" value={version(fleet.latest)} note={parts.filter((part) => part !== "").join(", ")} id="latest" level={late ? "warning" : ""} />;
}

/** Times the usual gap between versions, after which the newest one is late. */
const LATE = 5;
const LEAST_GAPS = 3;

/** Half of the last gaps between versions are shorter; null where too few are known. */
function usualGap(versions: Version[]): number | null {
  const times = versions.slice(0, 20).flatMap(({ created }) => created ?? []);
  const gaps = times.slice(1).map((time, at) => times[at]! - time).sort((a, b) => a - b);
  return gaps.length < LEAST_GAPS ? null : gaps[gaps.length >> 1]!;
}

function running(fleet: Fleet): number {
  return fleet.hosts.filter((host) => host.standing !== "stopped" && !isGhost(host)).length;
}

/** Ready hosts serve their local version: more than those that have the newest. */
function readyText({ hosts, counts }: Fleet): string {
  const ready = hosts.filter((host) => host.ready && host.presence === "live" && host.standing !== "stopped").length;
  return ready === counts.ready ? "" : `, ${count(ready)} ready`;
}

function readyLevel(fleet: Fleet): Level | "" {
  if (running(fleet) === 0) return "";
  if (fleet.counts.ready === running(fleet)) return "good";
  return fleet.counts.ready === 0 ? "bad" : "warning";
}

function lagLevel(fleet: Fleet): Level | "" {
  const lag = largestLag(fleet);
  return lag === null ? "" : lag > 0 ? "warning" : "good";
}

function LinkState({ link, came }: { link: Link; came: number }) {
  const now = useNow();
  const old = came === 0 ? "" : ` Shown is what was known ${age((now - came) / 1000)} ago.`;
  const texts = {
    connecting: "Connecting",
    live: "Connected",
    lost: link.state === "lost" ? `Connection lost: ${link.why}. Trying again.${old}` : "",
  };
  // The ticking age would be read out every second: only the change of state is said.
  return (
    <p class={`link ${link.state}`} data-link={link.state}>
      <span aria-hidden="true">{texts[link.state]}</span>
      <span class="unseen" role="status">
        {link.state === "lost" ? "Connection to the publisher lost" : texts[link.state]}
      </span>
    </p>
  );
}

function largestLag(fleet: Fleet): number | null {
  return fleet.lag.length === 0 ? null : Math.max(...fleet.lag.map(({ lag }) => lag));
}

function lagUnit(fleet: Fleet): string {
  const lag = largestLag(fleet);
  return lag === null ? "" : lag === 1 ? "version" : "versions";
}

function title(fleet: Fleet | null): string {
  if (fleet === null) return "weightcast";
  if (fleet.hosts.length === 0 && fleet.verdict.level === "good") return `no hosts · v${version(fleet.latest)} · weightcast`;
  const some = standings(fleet, STANDINGS.filter((each) => each !== "ready" && each !== "stopped"));
  const rest = fleet.verdict.level === "good" ? "all up to date" : "see publisher";
  return `${some === "" ? rest : some} · v${version(fleet.latest)} · weightcast`;
}

function standings(fleet: Fleet, which: readonly Standing[]): string {
  const some = which.filter((each) => fleet.counts[each] > 0);
  return some.map((each) => `${fleet.counts[each]} ${each}`).join(", ");
}
