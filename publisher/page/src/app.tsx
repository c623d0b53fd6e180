import { useState } from "preact/hooks";
import { CatchUpPart } from "./catch_up.tsx";
import { FleetPart } from "./fleet_table.tsx";
import { Head } from "./head.tsx";
import { LagPart } from "./lag.tsx";
import { Token, useLive } from "./live.ts";
import { PlanPart } from "./plan.tsx";
import { RequestsPart } from "./requests.tsx";
import { TokenForm } from "./token_form.tsx";
import { VersionsPart } from "./versions.tsx";

/** Of this tab alone, gone with it. */
const TOKEN = "weightcast-token";

export function App() {
  const [token, setToken] = useState(() => sessionStorage.getItem(TOKEN));
  const [asked, setAsked] = useState(false);
  const take = (given: string) => {
    sessionStorage.setItem(TOKEN, given);
    setToken(given);
    setAsked(false);
  };
  if (asked) return <TokenForm refused={token !== null} take={take} />;
  return <Page token={token} refused={() => setAsked(true)} />;
}

function Page({ token, refused }: { token: string | null; refused: () => void }) {
  const shown = useLive(token, refused);
  return (
    <Token.Provider value={token}>
      <a class="skip" href="#hosts" onClick={toHosts}>
        Skip to the hosts
      </a>
      <Head shown={shown} />
      <main>
        {shown.fleet?.hosts.length !== 0 && <LagPart part={shown.lag} versions={shown.versions.value?.versions ?? []} />}
        <FleetPart fleet={shown.fleet} came={shown.came} live={shown.link.state === "live"} />
        <RequestsPart fleet={shown.fleet} />
        <VersionsPart part={shown.versions} lag={shown.lag.value?.samples ?? []} />
        <CatchUpPart part={shown.catchUp} />
        <PlanPart part={shown.plan} />
      </main>
      <footer>
        Hosts are shown as they report themselves. <a href="docs">API</a> <a href="page/licenses.txt">Licences</a>
      </footer>
    </Token.Provider>
  );
}

/** By hand: the address behind # holds how the hosts are shown. */
function toHosts(event: Event): void {
  event.preventDefault();
  document.getElementById("hosts")?.focus();
}
