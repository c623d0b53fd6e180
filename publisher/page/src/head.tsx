import { useEffect } from "preact/hooks";
import { STANDINGS, type Fleet, type Standing } from "./api.ts";
import type { Link } from "./events.ts";
import { age, bytes, count, round, version } from "./format.ts";
import { useNow, type Shown } from "./live.ts";

export function Head({ shown }: { shown: Shown }) {
  const { fleet, link, came } = shown;
  const newest = shown.versions.value?.versions[0];
  useEffect(() => void (document.title = title(fleet)), [fleet]);
  return (
    <header>
      <div class="bar">
        <h1>weightcast</h1>
        {fleet !== null && (
          <p class="run">
            <span class="path">{fleet.channel}</span>
            {fleet.run_id !== null && <span class="path">run {fleet.run_id.slice(0, 12)}</span>}
          </p>
        )}
        <LinkState link={link} came={came} />
      </div>
      {fleet !== null && (
        <dl class="figures">
          <Figure name="Latest version" value={version(fleet.latest)} note={newest?.step == null ? "" : `step ${count(newest.step)}`} id="latest" />
          <Figure name="Hosts ready" value={count(fleet.counts.ready)} note={`of ${count(fleet.hosts.length)}`} id="ready" />
          <Figure name="Largest lag" value={count(largestLag(fleet))} note="versions" id="largest-lag" />
          <Figure name="Newest delta" value={bytes(newest?.bytes)} note={newest?.ratio == null ? "" : `1/${round(newest.ratio)} of full`} id="newest" />
        </dl>
      )}
      <p class="unseen" role="status">
        {fleet !== null && standings(fleet, ["lost", "failed"])}
      </p>
    </header>
  );
}

function Figure({ name, value, note, id }: { name: string; value: string; note: string; id: string }) {
  return (
    <div id={`figure-${id}`}>
      <dt>{name}</dt>
      <dd>
        <strong>{value}</strong> <span>{note}</span>
      </dd>
    </div>
  );
}

function LinkState({ link, came }: { link: Link; came: number }) {
  const now = useNow();
  const old = came === 0 ? "" : ` Shown is what was known ${age((now - came) / 1000)} ago.`;
  const texts = {
    connecting: "Connecting",
    live: "Live",
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
  const lags = fleet.hosts.map((host) => host.lag).filter((lag) => lag !== null);
  return lags.length === 0 ? null : Math.max(...lags);
}

function title(fleet: Fleet | null): string {
  if (fleet === null) return "weightcast";
  const some = standings(fleet, STANDINGS.filter((each) => each !== "ready"));
  return `${some === "" ? "all ready" : some} · v${version(fleet.latest)} · weightcast`;
}

function standings(fleet: Fleet, which: readonly Standing[]): string {
  const some = which.filter((each) => fleet.counts[each] > 0);
  return some.map((each) => `${fleet.counts[each]} ${each}`).join(", ");
}
