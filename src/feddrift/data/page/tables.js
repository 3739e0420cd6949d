// Sentences and tables.
const HOW = ["", "alarm", "switch", "alarm and switch"];

function table(head, rows, caption) {
  return h("table", {}, caption ? h("caption", {}, caption) : null,
    h("thead", {}, h("tr", {}, head.map(([text, kind, title]) => h("th", { class: kind, scope: "col", title }, text)))),
    h("tbody", {}, rows));
}
const cells = (values, kinds = []) => values.map((value, i) => h("td", { class: kinds[i] }, value instanceof Node ? value : String(value)));

function both(spread, show) {
  if (!spread || !known(spread[0])) return "–";
  return h("span", {}, show(spread[0]), known(spread[1]) ? h("span", { class: "sd" }, ` ± ${show(spread[1])}`) : null);
}

function peer(stream, name, seed) {
  const groups = stream.groups.filter((g) => g.algorithm === name);
  const run = groups.flatMap((g) => g.runs).find((r) => r.seed === seed);
  return run || null;
}

function gist(view) {
  const { run, stream, group } = view, d = run.detection.noticed, told = [];
  if (!run.steps) return "No time step is done yet.";
  if (d && d.changes) {
    const lateness = run.drifts.filter((x) => x[4] > 0).length;
    const when = d.hits === 0 ? "" : lateness === 0 ? ", each in the step in which it happened" : `, ${lateness} of them late`;
    told.push(`${d.hits} of ${count(d.changes, "drift")} noticed${when}; ${d.alarms - d.hits === 0 ? "no false move" : count(d.alarms - d.hits, "false move")}.`);
  } else if (d) told.push(`No client's concept changed; ${d.alarms === 0 ? "no false move" : count(d.alarms, "false move")}.`);
  else {
    const alarms = run.false.filter((f) => f[2] & 1), who = new Set(alarms.map((f) => f[1]));
    told.push(alarms.length ? `${count(alarms.length, "alarm")} at ${count(who.size, "client")}. The true concepts are not known.` : "No alarm was raised. The true concepts are not known.");
  }
  const used = run.used[run.steps - 1], concepts = run.concepts && run.concepts[run.steps - 1];
  told.push(`${run.steps < run.n_steps ? "So far the clients use" : "At the end the clients used"} ${count(used, "model")}${concepts ? ` for ${count(concepts, "concept")}` : ""}.`);
  const others = ["Oracle", "Oblivious"].filter((name) => name !== group.algorithm).map((name) => [name, peer(stream, name, run.seed)]).filter(([, r]) => r && r.steps === run.steps);
  told.push(`Mean accuracy ${percent(run.numbers.mean)} %` + others.map(([name, r]) => `; ${name} ${percent(r.numbers.mean)} %`).join("") + ".");
  return told.join(" ");
}

function tiles(view) {
  const { run } = view, x = run.numbers, d = run.detection.noticed, found = [];
  const tile = (name, value, unit, aside) => h("div", {}, h("dt", {}, name), h("dd", {}, h("div", { class: "value" }, value, unit ? h("span", { class: "unit" }, unit) : null), h("div", { class: "aside" }, aside || " ")));
  found.push(tile("Mean accuracy", percent(x.mean), "%", known(x.omitting) ? `${percent(x.omitting)} % omitting drifts` : "over clients and times"));
  const worst = run.worst[0];
  found.push(tile("Worst client", percent(x.worst), "%", worst ? `${nameOf(view.stream, worst[0])}; 10th pct. ${percent(x.tenth)} %` : ""));
  if (d) {
    found.push(tile("Drifts noticed", `${d.hits}`, `of ${d.changes}`, known(d.delay) ? `mean delay ${number(d.delay)} steps` : ""));
    found.push(tile("False moves", `${d.alarms - d.hits}`, "", known(d.precision) ? `precision ${number(d.precision)}` : "nothing was said"));
  } else found.push(tile("Alarms", String(run.false.filter((f) => f[2] & 1).length), "", "concepts unknown"));
  found.push(tile(run.steps < run.n_steps ? "Models now" : "Models at the end", run.steps ? String(run.exist[run.steps - 1]) : "–", "", run.steps ? `${run.used[run.steps - 1]} in use${run.concepts ? `, ${count(run.concepts[run.steps - 1], "concept")}` : ""}` : ""));
  found.push(tile("Models sent", number(x.sent), "×", "what one model costs"));
  return found;
}

function detectionTable(view) {
  const { run, stream, group } = view, d = run.detection, within = view.data.within;
  const head = [["", "text"], ["precision"], ["recall"], ["delay", "", `mean steps; missed counts as ${within + 1}`], ["moves"], ["false"], ["missed"]];
  const exact = (x) => (Number.isInteger(x) ? String(x) : x.toFixed(1));
  const line = (name, v, kind) => h("tr", { class: kind }, cells([name, number(v.precision), number(v.recall), number(v.delay), exact(v.alarms), exact(v.alarms - v.hits), exact(v.changes - v.hits)]));
  const rows = [line(`${group.algorithm}: alarms or switches`, d.noticed, "self"), line("alarms alone", d.alarms), line("switches alone", d.switches)];
  for (const name of ["Oracle", "Oblivious"]) {
    const other = name === group.algorithm ? null : peer(stream, name, run.seed);
    if (other && other.detection.noticed) rows.push(line(`${name}: alarms or switches`, other.detection.noticed));
  }
  rows.push(line("dummy: a coin, as often", d.chance, "dummy"), line("dummy: always", d.always, "dummy"), line("dummy: never", d.never, "dummy"));
  return table(head, rows);
}

// Every drift and every false move, newest question first: who, when, noticed how, and why.
function driftRows(view) {
  const { run } = view, rows = [];
  const reason = (t, c) => (view.maps ? reasons(view.maps, t, c).join(" ") : eventsOf(run, t, c));
  for (const [t, c, from, to, delay, how] of run.drifts || []) {
    const tag = delay < 0 ? h("span", { class: "tag bad" }, "missed") : h("span", { class: `tag ${delay ? "late" : "good"}` }, delay ? `${count(delay, "step")} late` : "at once");
    rows.push({ t, c, kind: delay < 0 ? "missed" : delay ? "late" : "at once", values: () => [`${letter(from)} → ${letter(to)}`, tag, delay < 0 ? "–" : HOW[how], delay < 0 ? "" : reason(t + delay, c)] });
  }
  for (const [t, c, how] of run.false) {
    const tag = run.drifts ? h("span", { class: "tag bad" }, "false") : "";
    rows.push({ t, c, kind: run.drifts ? "false" : HOW[how], values: () => [run.drifts ? "no change" : "unknown", tag, HOW[how], reason(t, c)] });
  }
  return rows.sort((a, b) => a.t - b.t || a.c - b.c);
}
function eventsOf(run, t, c) {
  return run.events.filter((e) => e.t === t && (e.clients || []).includes(c)).map((e) => sentence(e.why)).join(" ");
}

function driftList(view, show = 12, only = "all") {
  const all = driftRows(view), kinds = [...new Set(all.map((r) => r.kind))];
  const rows = all.filter((r) => only === "all" || r.kind === only);
  if (!all.length) return [h("p", { class: "note" }, "No drift, no alarm, no switch.")];
  const open = (r) => h("button", { type: "button", class: "link", onclick: () => view.choose(r.t, r.c, true) }, nameOf(view.stream, r.c));
  const head = [["time", "text"], ["client", "text"], ["concept", "text"], ["noticed", "text"], ["by", "text"], ["why", "text"]];
  const kind = ["text", "text tight", "text tight", "text tight", "text tight", "text wide"];
  const again = (n, what) => fill("drifts-list", driftList(view, n, what));
  const filter = h("div", { class: "segments" }, ["all", ...kinds].map((what) => h("button", { type: "button", "aria-pressed": String(what === only), onclick: () => again(show, what) },
    `${what} ${what === "all" ? all.length : all.filter((r) => r.kind === what).length}`)));
  return [
    kinds.length > 1 ? h("div", { class: "controls" }, filter) : null,
    table(head, rows.slice(0, show).map((r) => h("tr", {}, cells([r.t + 1, open(r), ...r.values()], kind)))),
    rows.length > show ? h("div", { class: "more" }, h("button", { type: "button", onclick: () => again(show * 4, only) }, "Show more"), `${show} of ${rows.length}`) : null,
  ];
}

function worstTable(view) {
  const { run, stream, maps } = view, oracle = view.group.algorithm === "Oracle" ? null : peer(stream, "Oracle", run.seed);
  const theirs = oracle && oracle.cells && run.cells && oracle.steps === run.steps ? (c) => {
    const values = range(run.steps).map((t) => oracle.cells.accuracy[t * stream.clients.length + c]).filter((v) => v >= 0);
    return values.length ? sum(values) / values.length / 1000 : null;
  } : null;
  const head = [["client", "text"], ["mean, %"], ...(theirs ? [["Oracle, %"]] : []), ["lowest at time"], ...(maps ? [["over time", "text"]] : [])];
  const rows = run.worst.slice(0, 8).map(([c, mean, low]) => h("tr", {}, cells([
    h("button", { type: "button", class: "link", onclick: () => view.choose(low, c, true) }, nameOf(stream, c)), percent(mean), ...(theirs ? [percent(theirs(c))] : []), low + 1,
    ...(maps ? [spark(maps, c)] : []),
  ], ["text", "", "", ...(theirs ? [""] : []), "text"].map((k, i, a) => (i === a.length - 1 ? "text" : k)))));
  return table(head, rows);
}

function spark(maps, c, width = 150, height = 22) {
  const svg = s("svg", { width, height, viewBox: `0 0 ${width} ${height}`, role: "img", "aria-label": "accuracy over time" });
  const x = (t) => 2 + (t / Math.max(1, maps.T - 1)) * (width - 4), y = (v) => height - 3 - (v / 1000) * (height - 6);
  const points = range(maps.T).map((t) => [t, maps.cells.accuracy[maps.at(t, c)]]).map(([t, v]) => [t, v < 0 ? null : v]);
  svg.append(s("line", { class: "axis", x1: 0, x2: width, y1: y(1000), y2: y(1000) }), s("path", { d: path(points, { x, y }), fill: "none", stroke: "var(--ink)", "stroke-width": 1.4 }));
  return svg;
}

// One client's story: what changed, what the algorithm noticed, and why, time by time.
function story(view) {
  const { maps, stream, run, chosen } = view;
  if (!maps || !chosen) return [h("p", { class: "note" }, "Choose a client in the map.")];
  const [now, c] = chosen, told = [];
  for (const t of range(maps.T)) {
    const k = maps.at(t, c), lines = [];
    const drift = (run.drifts || []).find((d) => d[0] === t && d[1] === c);
    if (drift) lines.push(`Its data changed from concept ${letter(drift[2])} to ${letter(drift[3])}` + (drift[4] < 0 ? "; nothing noticed it." : drift[4] ? `; noticed ${count(drift[4], "step")} later.` : "; noticed at once."));
    else if (run.drifts && run.false.some((f) => f[0] === t && f[1] === c)) lines.push("Its data had not changed: a false move.");
    lines.push(...reasons(maps, t, c));
    if (t === now && !lines.length) lines.push(t ? `It kept model ${maps.cells.model[k]}.` : `It began with model ${maps.cells.model[k]}.`);
    if (t === now) lines.push(`Tested next: ${maps.cells.accuracy[k] < 0 ? "no data" : (maps.cells.accuracy[k] / 10).toFixed(1) + " %"}.`);
    if (lines.length) told.push(h("li", { "aria-current": t === now ? "step" : null }, h("span", { class: "when" }, t === now ? h("b", {}, `time ${t + 1}`) : `time ${t + 1}`), h("div", {}, lines.map((line) => h("p", {}, line)))));
  }
  const values = range(maps.T).map((t) => maps.cells.accuracy[maps.at(t, c)]).filter((v) => v >= 0);
  return [
    h("h3", {}, nameOf(stream, c)),
    h("p", { class: "note" }, values.length ? `Mean accuracy ${percent(sum(values) / values.length / 1000)} %.` : "Never tested.", " Click a cell, or use the arrow keys on the map, for another."),
    h("div", { class: "strip" }, spark(maps, c, 300, 34)),
    h("ol", {}, told),
  ];
}

const COLUMNS = [
  ["accuracy, %", "mean", percent, "mean over clients and times"], ["omitting drifts", "omitting", percent, "without the rows that a drift strikes"],
  ["worst client", "worst", percent], ["10th pct.", "tenth", percent, "10th percentile over clients"], ["precision", "noticed precision", number], ["recall", "noticed recall", number],
  ["delay", "noticed delay", number], ["lost per drift", "lost", number, "accuracy times steps, against the level before"], ["lost to Oracle", "lost_to_oracle", number],
  ["ARI", "ari", number], ["NMI", "nmi", number], ["spare models", "spare", number, "in use beyond the concepts alive"], ["sent", "sent", number, "relative to one model"],
];

function comparison(view) {
  const { stream, group } = view;
  const columns = COLUMNS.filter(([, name]) => stream.groups.some((g) => g.numbers[name] && known(g.numbers[name][0])));
  const rows = stream.groups.map((g) => h("tr", { class: g === group ? "self" : null }, cells([
    g === group ? g.label : h("button", { type: "button", class: "link", onclick: () => view.open(g) }, g.label), g.runs.length,
    ...columns.map(([, name, show]) => (name === "mean" ? both(g.numbers[name], show) : show((g.numbers[name] || [null])[0]))),
  ])));
  return table([["", "text"], ["seeds"], ...columns.map(([text, , , title]) => [text, "", title])], rows);
}
