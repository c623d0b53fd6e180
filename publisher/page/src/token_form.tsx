import { useEffect, useRef } from "preact/hooks";

export function TokenForm({ refused, take }: { refused: boolean; take: (token: string) => void }) {
  const field = useRef<HTMLInputElement>(null);
  useEffect(() => field.current?.focus(), []);
  const send = (event: Event) => {
    event.preventDefault();
    const given = field.current!.value.trim();
    if (given !== "") take(given);
  };
  return (
    <main class="token">
      <form onSubmit={send}>
        <h1>weightcast</h1>
        <label for="token">Token of this publisher</label>
        <input id="token" ref={field} type="password" autocomplete="off" spellcheck={false} aria-describedby="token-note" />
        <p id="token-note" role="status">
          {refused ? "The publisher did not take this token. " : ""}It is what WEIGHTCAST_TOKEN names there, and is kept
          until this tab is closed.
        </p>
        <button type="submit">Open</button>
      </form>
    </main>
  );
}
