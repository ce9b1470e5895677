// Pictures of the page in headless Chromium, axe-core's findings, and times of first paint and update.
//
//   npm install puppeteer-core axe-core      (anywhere; NODE_PATH names its node_modules; CHROMIUM the browser)
//   NODE_PATH=node_modules tests/page/pictures.sh
//   node tests/page/pictures.cjs ADDRESS PREFIX light dark phone wide timeline details samples lost use growing axe times
//
// It exits with 1 if axe-core finds something serious, if a text of the run was parsed as markup, if a text in a drawing is
// cut off at the side, or if the page logs an error.
"use strict";
const { readFileSync } = require("node:fs");
const puppeteer = require("puppeteer-core");

const [address, out, ...wanted] = process.argv.slice(2);
const SIZES = { light: [1280, 1620], dark: [1280, 1620], phone: [390, 844], wide: [1280, 900], timeline: [1120, 900] };
const FORMAT = { type: "webp", quality: 85 };
let failed = false;

async function open(browser, name) {
  const page = await browser.newPage(), [width, height] = SIZES[name] ?? SIZES.light;
  page.on("pageerror", (error) => report(`error: ${error.message}`));
  page.on("console", (line) => line.type() === "error" && name !== "lost" && report(`console: ${line.text()}`));
  await page.setViewport({ width, height, deviceScaleFactor: name === "phone" ? 2 : 1, hasTouch: name === "phone" });
  await page.emulateMediaFeatures([
    { name: "prefers-color-scheme", value: name === "dark" ? "dark" : "light" },
    { name: "prefers-reduced-motion", value: "reduce" },
  ]);
  await page.evaluateOnNewDocument(noteClipped);
  await page.goto(address, { waitUntil: "load" });
  await page.waitForFunction(() => document.getElementById("samples-note").textContent, { timeout: 20_000 });
  if (await page.evaluate(() => window.parsed || document.querySelector("img"))) report("a text of the run was parsed as markup");
  const clipped = await page.evaluate(() => [...window.clipped]);
  if (clipped.length) report(`cut off at the side of a drawing: ${clipped.join(", ")}`);
  return page;
}

/** In the page: remember the texts that are drawn beyond the left or right side of their canvas. */
function noteClipped() {
  const draw = CanvasRenderingContext2D.prototype.fillText;
  window.clipped = new Set();
  CanvasRenderingContext2D.prototype.fillText = function (text, x, y, most = Infinity) {
    const width = Math.min(most, this.measureText(text).width), { a, e } = this.getTransform();
    const left = x - width * ({ center: 0.5, right: 1, end: 1 }[this.textAlign] ?? 0);
    if (a * left + e < -1 || a * (left + width) + e > this.canvas.width + 1) window.clipped.add(text);
    draw.call(this, text, x, y, ...(most < Infinity ? [most] : []));
  };
}

function report(text) {
  failed = true;
  console.log(text);
}

const openDetails = (page) => page.evaluate(() => document.querySelectorAll("details").forEach((one) => (one.open = true)));

async function axe(page) {
  await page.setBypassCSP(true);
  await page.reload();
  await page.waitForFunction(() => document.getElementById("samples-note").textContent);
  await openDetails(page);
  await page.evaluate(readFileSync(require.resolve("axe-core/axe.min.js"), "utf8"));
  const found = await page.evaluate(() => window.axe.run());
  for (const one of found.violations) {
    const text = `${one.impact}: ${one.id}: ${one.help} (${one.nodes.length}): ${one.nodes[0].html.slice(0, 160)}`;
    if (["serious", "critical"].includes(one.impact)) report(text);
    else console.log(text);
  }
  console.log(`axe-core ${found.testEngine.version}: ${found.violations.length} findings, ${found.passes.length} rules passed`);
}

/** Zoom by key and by dragging, hover, turn the samples: with keyboard and mouse as a person would. */
async function use(page) {
  const label = () => page.$eval("#lanes", (canvas) => canvas.getAttribute("aria-label"));
  const seen = [await label()];
  await page.focus("#lanes");
  for (const key of ["+", "ArrowLeft", "0"]) {
    await page.keyboard.press(key);
    seen.push(await label());
  }
  const box = await (await page.$("#lanes")).boundingBox(), y = box.y + box.height - 40;
  await page.mouse.move(box.x + 500, y);
  await page.mouse.down();
  await page.mouse.move(box.x + 700, y, { steps: 4 });
  await page.mouse.up();
  seen.push(await label());
  const tip = await page.$eval("#tip", (node) => (node.hidden ? "" : node.innerText.replaceAll("\n", " | ")));
  await page.mouse.click(box.x + 600, y, { clickCount: 2 });
  seen.push(await label());
  await page.click("#older");
  const note = await page.$eval("#samples-note", (node) => node.textContent);
  console.log([...seen, tip, note].join("\n"));
  const [whole, closer, earlier, again, dragged, last] = seen;
  const worked = whole !== closer && closer !== earlier && again === whole && dragged !== whole && last === whole;
  if (!worked || !tip || note.startsWith("1 ")) report("zoom, hover or samples do not work");
}

/** Watch a run until it ends: its sentence, its timeline and its charts go on; then everything stays. */
async function growing(page) {
  const seen = new Set(), look = () => page.evaluate(() => ({
    sentence: document.getElementById("sentence").textContent, label: document.getElementById("lanes").getAttribute("aria-label"),
    step: document.querySelectorAll(".card")[1].querySelector(".u-value")?.textContent, state: document.getElementById("connection").textContent,
  }));
  let last = await look();
  for (let i = 0; i < 100 && last.state !== "finished"; i++) {
    seen.add(JSON.stringify(last));
    await new Promise((done) => setTimeout(done, 1000));
    last = await look();
  }
  console.log(`${seen.size} looks; at the end: ${JSON.stringify(last)}`);
  if (seen.size < 10 || last.state !== "finished" || last.step !== "48") report("the page does not follow the run to its end");
  await page.screenshot({ ...FORMAT, path: `${out}growing.webp` });
}

/** First paint, and updates with new rows: as they took, and the CPU time of the main thread (tasks of all kinds). */
async function times(page) {
  const client = await page.createCDPSession(), updates = (count) => page.waitForFunction(
    (wanted) => performance.getEntriesByName("update").length >= wanted, { timeout: 60_000, polling: 500 }, count);
  const cpu = async () => (await client.send("Performance.getMetrics")).metrics.find((one) => one.name === "TaskDuration").value;
  await client.send("Performance.enable", { timeDomain: "threadTicks" });
  await updates(2);
  const before = await cpu();
  await updates(10);
  console.log(`CPU time of the main thread per update: ${Math.round((1000 * (await cpu() - before)) / 8)} ms`);
  const found = await page.evaluate(() => {
    const at = (name) => performance.getEntriesByName(name)[0]?.startTime ?? null;
    const updates = performance.getEntriesByName("update").map((entry) => entry.duration);
    return { paint: at("first-contentful-paint"), shown: at("shown"), updates };
  });
  const ms = (x) => `${Math.round(x)} ms`;
  console.log(`first contentful paint ${ms(found.paint)}, the run is shown after ${ms(found.shown)}, main thread of updates: ${found.updates.map(ms).join(", ")}`);
}

(async () => {
  const browser = await puppeteer.launch({ executablePath: process.env.CHROMIUM ?? "/usr/bin/chromium", args: ["--no-sandbox", "--disable-gpu"] });
  try {
    for (const name of wanted) {
      const page = await open(browser, name);
      if (name === "axe") await axe(page);
      else if (name === "use") await use(page);
      else if (name === "growing") await growing(page);
      else if (name === "lost") {
        await page.setOfflineMode(true);
        await page.waitForSelector("#connection.lost", { timeout: 30_000 });
        await page.screenshot({ ...FORMAT, path: `${out}lost.webp` });
        await page.setOfflineMode(false);
        await page.waitForSelector("#connection.live", { timeout: 60_000 });
      } else if (name === "times") {
        await times(page);
      } else {
        if (["details", "samples"].includes(name)) await openDetails(page);
        await page.evaluate(() => new Promise((done) => requestAnimationFrame(() => requestAnimationFrame(done))));
        if (name === "samples") await page.select("#sample-filter", "trained").then(() => openDetails(page));
        const shown = name === "samples" ? await page.$("section:has(> #samples)") : page;
        const bottom = await page.$eval("section", (timeline) => Math.ceil(timeline.getBoundingClientRect().bottom));
        const part = { details: { fullPage: true }, timeline: { clip: { x: 0, y: 0, width: SIZES.timeline[0], height: bottom + 12 } } };
        await shown.screenshot({ ...FORMAT, path: `${out}${name}.webp`, ...part[name] });
      }
      await page.close();
    }
  } finally {
    await browser.close();
  }
  process.exitCode = failed ? 1 : 0;
})();
