// Texts about a run, the history of a client, and the reasons of a cell.

// Kinds of moves, which are added up, as in data.py.
const ALARM = 1,
  SWITCH = 2,
  COMMON_CAUSE = 4;
const MAX_NAMED_MOVES = 4; // of more alarms or switches, the summary has only the number

// Summarises a run in a few sentences.
function summariseRun(view) {
  const { run, stream, group } = view,
    d = run.detection.noticed,
    sentences = [];
  if (!run.steps) return "No time step is done yet.";
  if (d && d.changes) {
    const late = sum(run.by_time.late);
    const when = d.hits === 0 ? "" : late === 0 ? ", each in the step in which it happened" : `, ${late} of them late`;
    sentences.push(
      `${d.hits.toLocaleString("en")} of ${count(d.changes, "drift")} noticed${when}; ` +
        `${d.alarms === d.hits ? "no false move" : count(d.alarms - d.hits, "false move")}.`,
    );
  } else if (d)
    sentences.push(`No client's concept changed; ${d.alarms === 0 ? "no false move" : count(d.alarms, "false move")}.`);
  sentences.push(...describeAlarms(run, stream, !d));
  if (!d) {
    const switches = run.n_moves[1];
    if (switches)
      sentences.push(
        `${count(switches, "switch", "switches")} to another model without an alarm` +
          `${nameMoves(run, stream, listMoves(run)[1], switches)}.`,
      );
    sentences.push("The true concepts are unknown.");
  }
  const used = run.used[run.steps - 1],
    concepts = run.concepts && run.concepts[run.steps - 1];
  sentences.push(
    (mayContinue(run) ? "So far the clients use " : "At the end the clients used ") +
      `${count(used, "model")}${concepts ? ` for ${count(concepts, "concept")}` : ""}.`,
  );
  const others = ["Oracle", "Oblivious"]
    .filter((name) => name !== group.algorithm)
    .map((name) => [name, findSameRun(stream, name, run)])
    .filter(([, r]) => r && r.steps === run.steps);
  if (run.tested < run.steps)
    sentences.push(
      `${sentence(timeOf(run, run.tested)).slice(0, -1)} is trained and not tested yet: it waits for new data.`,
    );
  sentences.push(
    `Mean ${score.title} ${level(run.numbers.mean)}${unit()}` +
      others.map(([name, r]) => `; ${name} ${level(r.numbers.mean)}${unit()}`).join("") +
      ".",
  );
  return sentences.join(" ");
}

// Describes how many alarms were raised, how many were acted on, and at how many the data changed as at most clients.
function describeAlarms(run, stream, named) {
  const { raised, acted_on, common, reviewed, confirmed, contradicted } = run.alarms;
  if (!raised) return ["No alarm was raised."];
  const one = raised === 1,
    none = acted_on === 0,
    all = acted_on === raised;
  const outcome = one
    ? `${none ? "but not" : "and"} acted on`
    : none
      ? "but none was acted on"
      : `and ${all ? (raised === 2 ? "both" : "all") : acted_on.toLocaleString("en")} ` +
        `${acted_on === 1 ? "was" : "were"} acted on`;
  const text = `${count(raised, "alarm")} ${one ? "was" : "were"} raised ${outcome}`,
    others = raised - common,
    names = named ? nameMoves(run, stream, listMoves(run)[0].filter((f) => !(f[2] & COMMON_CAUSE)), others) : "";
  const sentences = common ? [`${text}.`] : [`${text}${names}.`];
  if (common) {
    const which = one ? "this alarm" : common === raised ? "all of them" : `${common.toLocaleString("en")} of them`;
    sentences.push(
      `At ${which} the data changed as at most clients, for example with a season` +
        (others && names ? `; the ${others === 1 ? "other alarm" : "other alarms"}${names}.` : "."),
    );
  }
  if (confirmed || contradicted) sentences.push(describeReviews(run.alarms));
  else if (reviewed) sentences.push(`Later data neither confirmed nor contradicted ${one ? "it" : "any"}.`);
  return sentences;
}

// Describes what later data said about the alarms that were compared with them.
function describeReviews({ raised, reviewed, confirmed, contradicted }) {
  const undecided = Math.max(0, reviewed - confirmed - contradicted),
    others = Math.max(0, raised - Math.max(reviewed, confirmed + contradicted)),
    parts = [`confirmed ${confirmed.toLocaleString("en")}`, `contradicted ${contradicted.toLocaleString("en")}`];
  if (undecided) parts.push(`left ${undecided.toLocaleString("en")} undecided`);
  const last = parts.pop();
  return (
    `Later data ${parts.join(", ")} and ${last}` +
    (others ? `; ${count(others, "alarm")} ${others === 1 ? "was" : "were"} not compared with later data.` : ".")
  );
}

// Names the clients and times of a few moves; of many, returns an empty text.
function nameMoves(run, stream, moves, n) {
  if (!n || n > MAX_NAMED_MOVES || moves.length < n) return "";
  return `: ${moves.map(([t, c]) => `${shortenMiddle(nameOf(stream, c), 24)} at ${timeOf(run, t)}`).join(", ")}`;
}

// Returns the alarms, and the switches to another model without an alarm, if the true concepts are unknown.
function listMoves(run) {
  return [run.false.filter((f) => f[2] & ALARM), run.false.filter((f) => !(f[2] & ALARM))];
}

// Returns the tiles with the most important numbers of a run.
function buildTiles(view) {
  const { run } = view,
    x = run.numbers,
    d = run.detection.noticed,
    tiles = [];
  const tile = (name, value, unit, aside) =>
    h(
      "div",
      {},
      h("dt", {}, name),
      h(
        "dd",
        {},
        h("div", { class: "value" }, value, unit ? h("span", { class: "unit" }, unit) : null),
        h("div", { class: "aside" }, aside || "\u00a0"),
      ),
    );
  tiles.push(
    tile(
      `Mean ${score.title}`,
      level(x.mean),
      unit(),
      known(x.omitting) ? `${level(x.omitting)}${unit()} omitting drifts` : "over clients and time steps",
    ),
  );
  const worst = run.worst[0],
    who = worst && !isSample(view.stream) ? `${shortenMiddle(nameOf(view.stream, worst[0]), 20)}; ` : ""; // the client may not be shown
  tiles.push(
    tile("Worst client", level(x.worst), unit(), worst ? `${who}10th percentile ${level(x.tenth)}${unit()}` : ""),
  );
  if (d) {
    tiles.push(
      tile(
        "Drifts noticed",
        d.hits.toLocaleString("en"),
        `of ${d.changes.toLocaleString("en")}`,
        known(d.delay) ? `mean delay ${number(d.delay)} steps` : "",
      ),
    );
    tiles.push(
      tile(
        "False moves",
        (d.alarms - d.hits).toLocaleString("en"),
        "",
        known(d.precision) ? `precision ${number(d.precision)}` : "no alarm or switch",
      ),
    );
  }
  const { raised, acted_on, common } = run.alarms,
    acted = acted_on === raised ? (raised === 1 ? "acted on" : "all acted on") : `${acted_on || "none"} acted on`;
  tiles.push(
    tile("Alarms", raised.toLocaleString("en"), "", raised ? acted + (common ? `; ${common} as at most clients` : "") : ""),
  );
  if (!d) tiles.push(tile("Switches", run.n_moves[1].toLocaleString("en"), "", "to another model without an alarm"));
  tiles.push(
    tile(
      mayContinue(run) ? "Models now" : "Models at the end",
      run.steps ? String(run.exist[run.steps - 1]) : "–",
      "",
      run.steps
        ? `${run.used[run.steps - 1]} in use${run.concepts ? `, ${count(run.concepts[run.steps - 1], "concept")}` : ""}`
        : "",
    ),
  );
  const all = known(x["bytes training"]) ? x["bytes training"] + x["bytes scoring"] : null;
  tiles.push(
    tile("Models sent", number(x.sent), "×", `those of one shared model${known(all) ? `; ${megabytes(all)} MB` : ""}`),
  );
  return tiles;
}

// The history of a client: the changes of its data, the reactions of the algorithm, and their reasons.
function buildHistory(view) {
  const { maps, stream, run, chosen } = view;
  if (!maps || !chosen) return [h("p", { class: "note" }, "Choose a client in the map.")];
  const [now, c] = chosen,
    entries = [];
  const name = (t) => (run.times[t] ? h("span", { class: "called" }, run.times[t]) : null);
  for (const t of range(maps.T)) {
    const k = maps.cellIndex(t, c),
      lines = [];
    const drift = (run.drifts || []).find((d) => d[0] === t && d[1] === c);
    if (drift)
      lines.push(
        `Its data changed from concept ${letter(drift[2])} to ${letter(drift[3])}` +
          (drift[4] < 0
            ? "; this was not noticed."
            : drift[4]
              ? `; noticed ${count(drift[4], "time step")} later.`
              : "; noticed at once."),
      );
    else if (run.drifts && run.false.some((f) => f[0] === t && f[1] === c))
      lines.push("Its concept had not changed: a false move.");
    const gap = (t) => t < maps.T && maps.nothing.has(maps.cellIndex(t, c));
    if (t && !maps.absent.has(k) && maps.absent.has(maps.cellIndex(t - 1, c))) lines.push("It joined: its first data.");
    else if (!maps.absent.has(k) && gap(t) && !(t && gap(t - 1))) {
      let back = t;
      while (gap(back)) back++;
      lines.push(`No new data reached the server${back < maps.T ? ` until ${timeOf(run, back)}` : " up to the end"}.`);
    }
    lines.push(...reasons(maps, t, c));
    if (t === now && maps.absent.has(k)) lines.push("It had not joined yet.");
    else if (t === now && !lines.length)
      lines.push(t ? `It kept model ${maps.cells.model[k]}.` : `It started with model ${maps.cells.model[k]}.`);
    if (t === now) lines.push(`${heading()} on the next time step: ${testOf(maps.cells.accuracy[k], "no data")}.`);
    if (lines.length)
      entries.push(
        h(
          "li",
          { "aria-current": t === now ? "step" : null },
          h("span", { class: "when" }, t === now ? h("b", {}, `time ${t + 1}`) : `time ${t + 1}`, name(t)),
          h(
            "div",
            {},
            lines.map((line) => h("p", {}, line)),
          ),
        ),
      );
  }
  const values = range(maps.T)
    .map((t) => maps.cells.accuracy[maps.cellIndex(t, c)])
    .filter((v) => v >= 0);
  return [
    h("h3", {}, nameOf(stream, c)),
    h(
      "p",
      { class: "note" },
      values.length ? `Mean ${score.title} ${level(sum(values) / values.length / 1000)}${unit()}.` : "Not tested.",
      " To choose another cell, click it or use the arrow keys on the map.",
    ),
    h("div", { class: "strip" }, spark(maps, c, 300, 34)),
    h("ol", {}, entries),
  ];
}

function spark(maps, c, width = 150, height = 22) {
  const svg = s("svg", {
    width,
    height,
    viewBox: `0 0 ${width} ${height}`,
    role: "img",
    "aria-label": `${score.title} over time`,
  });
  const x = (t) => 2 + (t / Math.max(1, maps.T - 1)) * (width - 4),
    y = (v) =>
      height - 3 - (Math.min(1, Math.max(0, v - maps.low) / Math.max(1, maps.high - maps.low)) * (height - 6));
  const points = range(maps.T)
    .map((t) => [t, maps.cells.accuracy[maps.cellIndex(t, c)]])
    .map(([t, v]) => [t, v < 0 ? null : v]);
  svg.append(
    s("line", { class: "axis", x1: 0, x2: width, y1: y(maps.high), y2: y(maps.high) }),
    s("path", { d: path(points, { x, y }), fill: "none", stroke: "var(--ink)", "stroke-width": 1.4 }),
  );
  return svg;
}

// The reasons for the model of a client: the events at this time that concern it. The reason of an alarm is that of the
// model that was created for it, or of the last decision.
function reasons(maps, t, c, numbers = true) {
  const k = maps.cellIndex(t, c),
    model = maps.cells.model[k],
    lines = [],
    general = []; // decisions for all clients come last
  const before = t ? maps.cells.model[maps.cellIndex(t - 1, c)] : null;
  const events = maps.run.events.filter((e) => e.t === t),
    own = events.filter((e) => (e.clients ? e.clients.includes(c) : e.model === model)),
    last = (kind) => own.filter((e) => e.kind === kind).pop();
  const alarm = maps.alarms.has(k) ? last("created") || last("decided") : null;
  for (const e of events) {
    const about = e === alarm ? "Alarm" : { created: `New model ${e.model}`, decided: "Decision" }[e.kind];
    if (about && own.includes(e)) lines.push(`${about}: ${e.why}.`);
    if (forAll(e)) general.push(`Decision for all clients: ${e.why}.`);
    if (e.kind === "merged" && e.model === before) lines.push(sentence(e.why));
  }
  const isNew = events.some((e) => e.kind === "created" && e.model === model);
  if (maps.alarms.has(k) && !alarm) lines.push("Alarm, but no new model for this client.");
  lines.push(...shiftsOf(maps.run, t, c));
  if (maps.switches.has(k) && !isNew)
    lines.push(`Moved from model ${before} to the existing model ${model}${numbers ? numbersOf(maps, t, c) : ""}.`);
  return [...lines, ...general];
}

// Scores on a client's new data at time t: `old`, the test of its previous model; `now`, the score of its current model
// before training; `next`, the next test of its current model. Unknown scores are null.
function evidence(maps, t, c) {
  const { accuracy, loss } = maps.cells,
    test = (t) => (t >= 0 && accuracy[maps.cellIndex(t, c)] >= 0 ? accuracy[maps.cellIndex(t, c)] / 1000 : null);
  return { old: test(t - 1), now: loss ? loss[maps.cellIndex(t, c)] : null, next: test(t) };
}

// The name, the format and the unit of a test beside scores before training; an error if those are errors.
function testBefore(run) {
  return score.name === "accuracy" && run.metric === "error"
    ? ["error", (x) => number(known(x) ? 1 - x : x, 3), ""]
    : [score.title, level, unit()];
}

function numbersOf(maps, t, c) {
  const { old, now } = evidence(maps, t, c),
    [what, show, unitOfTest] = testBefore(maps.run),
    [before, after] = [maps.cellIndex(t - 1, c), maps.cellIndex(t, c)].map((k) => maps.cells.model[k]);
  const parts = [
    known(old) && `model ${before} had ${what} ${show(old)}${unitOfTest}`,
    known(now) && `model ${after} had ${maps.run.metric} ${number(now, 3)} before training`,
  ].filter(Boolean);
  return parts.length ? `: on its new data, ${parts.join(" and ")}` : "";
}

function sentence(text) {
  return text.charAt(0).toUpperCase() + text.slice(1) + (text.endsWith(".") ? "" : ".");
}

// Shortens a name in its middle, since long names often differ at their ends.
function shortenMiddle(name, length) {
  if (name.length <= length) return name;
  const nLast = Math.ceil(0.6 * (length - 1));
  return `${name.slice(0, length - 1 - nLast).trimEnd()}…${name.slice(-nLast).trimStart()}`;
}

// Shortens names so that they stay different: without the words with which all of them begin, then in their middle.
function shortenNames(names, length) {
  if (names.every((name) => name.length <= length)) return names;
  const common = findCommonWords(names).length;
  return names.map((name) => shortenMiddle(common ? `…${name.slice(common)}` : name, length));
}

// Returns the words with which all names begin.
function findCommonWords(names) {
  let n = names.length > 1 ? names[0].length : 0;
  for (const name of names) while (!name.startsWith(names[0].slice(0, n))) n--;
  return names[0].slice(0, n).replace(/[\p{L}\p{N}]+$/u, "");
}

function nameOf(stream, c) {
  return /^\d+$/.test(stream.clients[c]) ? `Client ${stream.clients[c]}` : stream.clients[c];
}

// Returns true if only a sample of the clients is shown individually.
function isSample(stream) {
  return stream.clients.length < stream.n_clients;
}

function forAll(event) {
  return event.kind === "decided" && !event.clients.length;
}

function eventsOf(run, t, c) {
  const events = run.events.filter((e) => e.t === t && ((e.clients || []).includes(c) || forAll(e)));
  return [...events.map((e) => sentence(e.why)), ...shiftsOf(run, t, c)].join(" ");
}

// The explanation of a client's alarm, if the record has one.
function shiftsOf(run, t, c) {
  const text = run.shifts[`${t},${c}`];
  return text ? [`Its data: ${text}.`] : [];
}
