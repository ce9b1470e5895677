// In a report: answers the page's requests from the data in the file. Loaded before the page's own scripts.
"use strict";
{
  const recorded = JSON.parse(document.getElementById("recorded").textContent);
  recorded.info.live = false;
  window.fetch = async (address) => {
    const asked = new URL(address, "http://report/");
    const name = asked.pathname.split("/").at(-1);
    const found = Object.hasOwn(recorded, name) ? recorded[name] : null;
    const since = Number(asked.searchParams.get("from") ?? 0);
    const body = found && "next" in found && since > 0 ? { rows: [], next: found.next } : found;
    return new Response(JSON.stringify(body), { status: found ? 200 : 404 });
  };
  document.addEventListener("DOMContentLoaded", () => document.getElementById("links")?.remove());
}
