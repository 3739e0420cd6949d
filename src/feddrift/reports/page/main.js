// The current selection, and functions that draw it.
const view = { by: "model", order: "given", strong: new Set() };

// Finds the item with this name, or else the one at position `otherwise`.
function pick(wanted, items, name, otherwise = 0) {
  return items.find((item) => String(name(item)) === wanted) || items[otherwise];
}

function load() {
  const now = state.read();
  view.stream = pick(now.stream, view.data.streams, (x) => x.name);
  view.group = pick(now.algorithm, view.stream.groups, (x) => x.label, view.stream.opens);
  view.run = pick(now.seed, view.group.runs, (x) => x.seed);
  view.maps = view.run.cells && view.run.steps ? new Maps(view.stream, view.run, view.choose) : null;
  view.by = now.by === "concept" && view.maps && view.maps.cells.concept ? "concept" : "model";
  view.order = ["given", "similar", "worst"].includes(now.order)
    ? now.order
    : view.stream.clients.length > 60
      ? "similar"
      : "given";
  const [, turned, by] = /^(-?)(.*)$/.exec(now.sort || "mean");
  view.sort = [by, turned === "-"];
  const c = view.stream.clients.indexOf(now.client),
    t = parseInt(now.time, 10) - 1;
  view.chosen = view.maps ? (c >= 0 ? [t >= 0 && t < view.run.steps ? t : 0, c] : firstOf(view.run)) : null;
}

// The initial cell: that of the first drift or move, else that of the worst client. Alarms come before switches, and
// alarms of clients whose data changed as at most clients last.
function firstOf(run) {
  const own = run.false.filter((f) => !(f[2] & COMMON_CAUSE)),
    alarms = own.filter((f) => run.drifts || f[2] & ALARM),
    listed = [alarms, own, run.false].find((found) => found.length) || [],
    moves = [...(run.drifts || []), ...listed];
  const first = moves.sort((a, b) => a[0] - b[0])[0];
  return first ? [first[0], first[1]] : run.worst.length ? [run.worst[0][2], run.worst[0][0]] : [0, 0];
}

view.choose = (t, c, scroll = false) => {
  view.chosen = [t, c];
  state.write({ client: view.stream.clients[c], time: t + 1 });
  if (view.maps) view.maps.select(t, c);
  fill("story", buildHistory(view));
  const now = document.querySelector(".story [aria-current]"); // scrolls the list only, not the page
  if (now) now.parentNode.scrollTop = now.offsetTop - now.parentNode.offsetTop - 40;
  if (scroll) $("h-map").scrollIntoView();
};

view.open = (group) => {
  state.write({ algorithm: group.label, seed: null, client: null, time: null });
  show();
  $("h-run").scrollIntoView({ block: "start" });
};

// Sorts the table by a column, best first; a second call for the same column reverses it. Its head keeps the focus.
view.sortBy = (name) => {
  const turned = view.sort[0] === name && !view.sort[1];
  view.sort = [name, turned];
  state.write({ sort: (turned ? "-" : "") + name });
  fill("compare", comparison(view));
  $("compare").querySelector("th[aria-sort] button").focus();
};

function chooser(name, label, items, chosen, change) {
  const select = h(
    "select",
    { name, "aria-label": label, onchange: (e) => change(e.target.value) },
    items.map((item) => h("option", { value: item, selected: item === chosen }, item)),
  );
  const text = h("span", { class: "label" }, label);
  return items.length > 1
    ? h("label", { class: `of-${name}` }, text, select)
    : h("label", { class: `of-${name} single` }, text, h("b", { title: chosen }, chosen));
}

function choosers() {
  const go = (changes) => {
    state.write({ client: null, time: null, ...changes });
    show();
  };
  fill(
    "choose",
    chooser(
      "stream",
      "Stream",
      view.data.streams.map((x) => x.name),
      view.stream.name,
      (stream) => go({ stream, algorithm: null, seed: null }),
    ),
    chooser(
      "algorithm",
      "Algorithm",
      view.stream.groups.map((x) => x.label),
      view.group.label,
      (algorithm) => go({ algorithm, seed: null }),
    ),
    chooser(
      "seed",
      "Seed",
      view.group.runs.map((x) => String(x.seed)),
      String(view.run.seed),
      (seed) => go({ seed }),
    ),
  );
}

function show() {
  load();
  choosers();
  for (const part of [lead, summary, accuracy, maps, drifts, recovery, resources, exchanges]) part();
}

function theme(next) {
  document.documentElement.dataset.theme = next;
  fill("theme", next === "dark" ? "Light" : "Dark");
}

async function start() {
  const dark = matchMedia("(prefers-color-scheme: dark)");
  const wanted = () => state.read().theme || (dark.matches ? "dark" : "light");
  theme(wanted());
  view.data = await unpack($("data").textContent);
  Object.assign(score, view.data.score);
  show();
  const again = () => {
    theme(wanted());
    show();
  };
  dark.addEventListener("change", again);
  addEventListener("hashchange", again);
  $("theme").addEventListener("click", () => {
    state.write({ theme: wanted() === "dark" ? "light" : "dark" });
    again();
  });
  $("copy").addEventListener("click", async () => {
    await navigator.clipboard.writeText(view.run.command);
    fill("copy", "Copied");
  });
  let width = innerWidth,
    waiting;
  addEventListener("resize", () => {
    clearTimeout(waiting);
    if (innerWidth !== width)
      waiting = setTimeout(() => {
        width = innerWidth;
        for (const part of [accuracy, maps, drifts, recovery, resources, exchanges]) part();
      }, 120);
  });
  // With an unfinished run, the page may be written again at any time: offer to reload it every few seconds.
  if (view.data.streams.some((x) => x.groups.some((g) => g.runs.some((r) => r.status === "unfinished")))) {
    const live = $("live"),
      on = () => state.read().live === "1";
    const tick = () => {
      live.setAttribute("aria-pressed", String(on()));
      if (on()) setTimeout(() => on() && location.reload(), 5000);
    };
    live.hidden = false;
    live.addEventListener("click", () => {
      state.write({ live: on() ? null : "1" });
      tick();
    });
    tick();
  }
  document.documentElement.dataset.ready = "yes";
}

start();
