import type { Publisher, RefusedCheckpoint } from "./api.ts";
import { age, count } from "./format.ts";
import { useNow } from "./live.ts";
import { Remedy } from "./remedy.tsx";

/** What the publisher itself is doing, and the last checkpoint it refused. */
export function PublisherStrip({ publisher, channel, came, live }: { publisher: Publisher; channel: string; came: number; live: boolean }) {
  const silent = Math.max(0, useNow() - came) / 1000;
  const { last_refused: refused, refused_since_version: since } = publisher;
  return (
    <section id="publisher" aria-labelledby="publisher-title">
      <h2 id="publisher-title" class="unseen">
        Publisher
      </h2>
      <dl class="strip">
        {facts(publisher, live).map(([name, value, level]) => (
          <div key={name} class={level}>
            <dt>{name}</dt>
            <dd>{value}</dd>
          </div>
        ))}
      </dl>
      {publisher.held !== "" && <Held publisher={publisher} channel={channel} />}
      {refused !== null && (since || (publisher.inbox.refused ?? 0) > 0) && <Refusal refused={refused} bad={since} silent={silent} />}
      {publisher.notes.length > 0 && (
        <ul class="notes">
          {publisher.notes.map((note) => (
            <li key={note}><Remedy text={note} /></li>
          ))}
        </ul>
      )}
    </section>
  );
}

type Fact = [name: string, value: string, level: "" | "good" | "warning" | "bad"];

function facts(publisher: Publisher, live: boolean): Fact[] {
  const inbox = Object.entries(publisher.inbox);
  return [
    state(publisher, live),
    ["Publishing", publisher.publishing || "nothing now", ""],
    ["Queue", count(publisher.queue), ""],
    ...inbox.map(([what, number]): Fact => [`Inbox ${what.replaceAll("_", " ")}`, count(number), what === "refused" && number > 0 ? "warning" : ""]),
  ];
}

function state({ ready, reasons, held }: Publisher, live: boolean): Fact {
  if (!live) return ["Publisher", "not connected", "bad"];
  if (!ready) return ["Publisher", `not ready: ${reasons.join("; ")}`, "bad"];
  return held === "" ? ["Publisher", "ready", "good"] : ["Publisher", "held", "warning"];
}

/** A rollback keeps everything else from being published. */
function Held({ publisher: { held, waiting = [] }, channel }: { publisher: Publisher; channel: string }) {
  const waits = waiting.length === 0 ? "No checkpoint waits." : `Published after resume: ${waiting.join(", ")}.`;
  return (
    <div class="problem warning" data-held>
      <p>
        <b>Publishing is held</b>: {held}. {waits}
      </p>
      <p>
        <Remedy text={`remove bad checkpoints and rewind the trainer, then \`weightcast channel resume --channel ${channel}\``} />
      </p>
    </div>
  );
}

function Refusal({ refused, bad, silent }: { refused: RefusedCheckpoint; bad: boolean; silent: number }) {
  const when = refused.seconds_ago === null ? "before this start" : `${age(refused.seconds_ago + silent)} ago`;
  return (
    <div class={`problem ${bad ? "bad" : "warning"}`} data-refused={refused.source}>
      <p>
        <b>{refused.source}</b> was refused {when}
        {bad && ", no version since"}: {refused.message}
      </p>
      {refused.remedy !== "" && <p><Remedy text={refused.remedy} /></p>}
    </div>
  );
}
