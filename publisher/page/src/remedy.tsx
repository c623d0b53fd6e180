import { useState } from "preact/hooks";
import { sentence } from "./format.ts";

/** What to do, with a button after each command in it. */
export function Remedy({ text }: { text: string }) {
  // every second part was between backticks
  const parts = sentence(text).split("`");
  return (
    <span class="remedy">
      {parts.map((part, at) =>
        at % 2 === 0 ? (
          part
        ) : (
          <>
            <code>{part}</code>
            {part.startsWith("weightcast ") && <Copy text={part} />}
          </>
        ),
      )}
    </span>
  );
}

function Copy({ text }: { text: string }) {
  const [done, setDone] = useState(false);
  return (
    <button type="button" class="copy" aria-label={`Copy ${text}`} onClick={() => void copied(text).then(setDone)}>
      {done ? "Copied" : "Copy"}
    </button>
  );
}

/** Whether it worked. Browsers have a clipboard only on loopback and over https. */
async function copied(text: string): Promise<boolean> {
  if (navigator.clipboard !== undefined) return navigator.clipboard.writeText(text).then(() => true, () => false);
  const field = document.createElement("textarea");
  field.value = text;
  document.body.append(field);
  field.select();
  const done = document.execCommand("copy");
  field.remove();
  return done;
}
