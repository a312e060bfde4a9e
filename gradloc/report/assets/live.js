// SPDX-License-Identifier: Apache-2.0
"use strict";
const frame = document.querySelector("iframe");
let version = document.body.dataset.version;
async function look() {
  try {
    const found = String((await (await fetch("/version", { cache: "no-store" })).json()).version);
    document.title = document.title.replace(" (stopped)", "");
    if (found === version) return;
    version = found;
    const place = { left: frame.contentWindow.scrollX, top: frame.contentWindow.scrollY, behavior: "instant" };
    frame.addEventListener("load", () => frame.contentWindow.scrollTo(place), { once: true });
    frame.contentWindow.location.reload();
  } catch {
    if (!document.title.endsWith(" (stopped)")) document.title += " (stopped)";
  }
}
setInterval(look, 2000);
