// Live pages fetch themselves every few seconds and take over the new <main>. Nothing else happens in the browser.
"use strict";

(() => {
  const main = document.querySelector("main[data-live]");
  if (!main) return;
  const seconds = Number(main.dataset.live);

  const busy = () =>
    document.hidden || main.querySelector("details[open]") || !window.getSelection().isCollapsed ||
    main.contains(document.activeElement);

  async function refresh() {
    try {
      if (busy()) return;
      const answer = await fetch(location.href, { cache: "no-store" });
      if (!answer.ok) return;
      const fresh = new DOMParser().parseFromString(await answer.text(), "text/html").querySelector("main");
      if (fresh && !busy()) main.replaceChildren(...fresh.childNodes);
      document.body.classList.remove("stale");
    } catch {
      document.body.classList.add("stale"); // the console does not answer: what is shown is old
    } finally {
      setTimeout(refresh, seconds * 1000);
    }
  }
  setTimeout(refresh, seconds * 1000);
})();
