// Texts about a run, the history of a client, and the reasons of a cell.

function gist(view) {
  const { run, stream, group } = view,
    d = run.detection.noticed,
    told = [];
  if (!run.steps) return "No time step is done yet.";
  if (d && d.changes) {
    const lateness = sum(run.by_time.late);
    const when =
      d.hits === 0 ? "" : lateness === 0 ? ", each in the step in which it happened" : `, ${lateness} of them late`;
    told.push(
      `${d.hits.toLocaleString("en")} of ${count(d.changes, "drift")} noticed${when}; ` +
        `${d.alarms === d.hits ? "no false move" : count(d.alarms - d.hits, "false move")}.`,
    );
  } else if (d)
    told.push(`No client's concept changed; ${d.alarms === 0 ? "no false move" : count(d.alarms, "false move")}.`);
  else {
    const [alarms, switches] = moves(run),
      [nAlarms, nSwitches] = run.n_moves;
    const who = (list, n) => {
      const named = list.slice(0, 4).map(([t, c]) => `${shorten(nameOf(stream, c), 24)} at ${timeOf(run, t)}`),
        more = n > named.length ? ` and ${(n - named.length).toLocaleString("en")} more` : "";
      return named.length ? `: ${named.join(", ")}${more}.` : ".";
    };
    told.push(nAlarms ? count(nAlarms, "alarm") + who(alarms, nAlarms) : "No alarm.");
    if (nSwitches)
      told.push(`${count(nSwitches, "switch", "switches")} to another model without an alarm${who(switches, nSwitches)}`);
    told.push("The true concepts are not known.");
  }
  const used = run.used[run.steps - 1],
    concepts = run.concepts && run.concepts[run.steps - 1];
  told.push(
    (goesOn(run) ? "So far the clients use " : "At the end the clients used ") +
      `${count(used, "model")}${concepts ? ` for ${count(concepts, "concept")}` : ""}.`,
  );
  const others = ["Oracle", "Oblivious"]
    .filter((name) => name !== group.algorithm)
    .map((name) => [name, peer(stream, name, run)])
    .filter(([, r]) => r && r.steps === run.steps);
  if (run.tested < run.steps)
    told.push(`${sentence(timeOf(run, run.tested)).slice(0, -1)} is trained and not tested yet: it waits for new data.`);
  told.push(
    `Mean ${score.title} ${level(run.numbers.mean)}${unit()}` +
      others.map(([name, r]) => `; ${name} ${level(r.numbers.mean)}${unit()}`).join("") +
      ".",
  );
  return told.join(" ");
}

// The alarms, and the switches to another model without an alarm, if the true concepts are unknown.
function moves(run) {
  return [run.false.filter((f) => f[2] & 1), run.false.filter((f) => !(f[2] & 1))];
}

function tiles(view) {
  const { run } = view,
    x = run.numbers,
    d = run.detection.noticed,
    found = [];
  const tile = (name, value, unit, aside) =>
    h(
      "div",
      {},
      h("dt", {}, name),
      h(
        "dd",
        {},
        h("div", { class: "value" }, value, unit ? h("span", { class: "unit" }, unit) : null),
        h("div", { class: "aside" }, aside || " "),
      ),
    );
  found.push(
    tile(
      `Mean ${score.title}`,
      level(x.mean),
      unit(),
      known(x.omitting) ? `${level(x.omitting)}${unit()} omitting drifts` : "over clients and times",
    ),
  );
  const worst = run.worst[0],
    who = worst && !isSample(view.stream) ? `${shorten(nameOf(view.stream, worst[0]), 20)}; ` : ""; // the client may not be shown
  found.push(tile("Worst client", level(x.worst), unit(), worst ? `${who}10th pct. ${level(x.tenth)}` : ""));
  if (d) {
    found.push(
      tile(
        "Drifts noticed",
        `${d.hits}`,
        `of ${d.changes}`,
        known(d.delay) ? `mean delay ${number(d.delay)} steps` : "",
      ),
    );
    found.push(
      tile(
        "False moves",
        `${d.alarms - d.hits}`,
        "",
        known(d.precision) ? `precision ${number(d.precision)}` : "no alarm or switch",
      ),
    );
  } else {
    const [alarms, switches] = run.n_moves;
    found.push(tile("Alarms", String(alarms), "", `and ${count(switches, "switch", "switches")} without one`));
  }
  found.push(
    tile(
      goesOn(run) ? "Models now" : "Models at the end",
      run.steps ? String(run.exist[run.steps - 1]) : "–",
      "",
      run.steps
        ? `${run.used[run.steps - 1]} in use${run.concepts ? `, ${count(run.concepts[run.steps - 1], "concept")}` : ""}`
        : "",
    ),
  );
  const all = known(x["bytes training"]) ? x["bytes training"] + x["bytes scoring"] : null;
  found.push(
    tile("Models sent", number(x.sent), "×", `what one model costs${known(all) ? `; ${megabytes(all)} MB` : ""}`),
  );
  return found;
}

// The history of a client: the changes of its data, the reactions of the algorithm, and their reasons.
function story(view) {
  const { maps, stream, run, chosen } = view;
  if (!maps || !chosen) return [h("p", { class: "note" }, "Choose a client in the map.")];
  const [now, c] = chosen,
    told = [];
  const name = (t) => (run.times[t] ? h("span", { class: "called" }, run.times[t]) : null);
  for (const t of range(maps.T)) {
    const k = maps.at(t, c),
      lines = [];
    const drift = (run.drifts || []).find((d) => d[0] === t && d[1] === c);
    if (drift)
      lines.push(
        `Its data changed from concept ${letter(drift[2])} to ${letter(drift[3])}` +
          (drift[4] < 0
            ? "; nothing noticed it."
            : drift[4]
              ? `; noticed ${count(drift[4], "step")} later.`
              : "; noticed at once."),
      );
    else if (run.drifts && run.false.some((f) => f[0] === t && f[1] === c))
      lines.push("Its data had not changed: a false move.");
    const gap = (t) => t < maps.T && maps.nothing.has(maps.at(t, c));
    if (t && !maps.absent.has(k) && maps.absent.has(maps.at(t - 1, c))) lines.push("It joined: its first data.");
    else if (!maps.absent.has(k) && gap(t) && !(t && gap(t - 1))) {
      let back = t;
      while (gap(back)) back++;
      lines.push(`No new data reached the server${back < maps.T ? ` until ${timeOf(run, back)}` : " from here on"}.`);
    }
    lines.push(...reasons(maps, t, c));
    if (t === now && maps.absent.has(k)) lines.push("It had not joined yet.");
    else if (t === now && !lines.length)
      lines.push(t ? `It kept model ${maps.cells.model[k]}.` : `It began with model ${maps.cells.model[k]}.`);
    if (t === now)
      lines.push(
        `Tested next: ${testOf(maps.cells.accuracy[k], "no data")}.`,
      );
    if (lines.length)
      told.push(
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
    .map((t) => maps.cells.accuracy[maps.at(t, c)])
    .filter((v) => v >= 0);
  return [
    h("h3", {}, nameOf(stream, c)),
    h(
      "p",
      { class: "note" },
      values.length ? `Mean ${score.title} ${level(sum(values) / values.length / 1000)}${unit()}.` : "Never tested.",
      " Click a cell, or use the arrow keys on the map, for another.",
    ),
    h("div", { class: "strip" }, spark(maps, c, 300, 34)),
    h("ol", {}, told),
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
    y = (v) => height - 3 - ((v - maps.low) / Math.max(1, maps.high - maps.low)) * (height - 6);
  const points = range(maps.T)
    .map((t) => [t, maps.cells.accuracy[maps.at(t, c)]])
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
  const k = maps.at(t, c),
    model = maps.cells.model[k],
    told = [];
  const before = t ? maps.cells.model[maps.at(t - 1, c)] : null;
  const events = maps.run.events.filter((e) => e.t === t),
    mine = events.filter((e) => (e.clients ? e.clients.includes(c) : e.model === model)),
    last = (kind) => mine.filter((e) => e.kind === kind).pop();
  const alarm = maps.alarms.has(k) ? last("created") || last("decided") : null;
  for (const e of events) {
    const about = e === alarm ? "Alarm" : { created: `New model ${e.model}`, decided: "Decided" }[e.kind];
    if (about && mine.includes(e)) told.push(`${about}: ${e.why}.`);
    if (forAll(e)) told.push(`Decided for all clients: ${e.why}.`);
    if (e.kind === "merged" && e.model === before) told.push(sentence(e.why));
  }
  const born = events.some((e) => e.kind === "created" && e.model === model);
  if (maps.alarms.has(k) && !alarm) told.push("Alarm, but no new model for this client.");
  told.push(...shiftsOf(maps.run, t, c));
  if (maps.switches.has(k) && !born)
    told.push(`Moved from model ${before} to model ${model}, which was there before${numbers ? numbersOf(maps, t, c) : ""}.`);
  return told;
}

// Scores on a client's new data at time t: `old`, the test of its previous model; `now`, the score of its current model
// before training; `next`, the next test of its current model. Unknown scores are null.
function evidence(maps, t, c) {
  const { accuracy, loss } = maps.cells,
    test = (t) => (t >= 0 && accuracy[maps.at(t, c)] >= 0 ? accuracy[maps.at(t, c)] / 1000 : null);
  return { old: test(t - 1), now: loss ? loss[maps.at(t, c)] : null, next: test(t) };
}

// The name and the format of a test beside scores before training; an error if those are errors.
function asBefore(run) {
  return score.name === "accuracy" && run.metric === "error"
    ? ["error", (x) => number(known(x) ? 1 - x : x, 3)]
    : [score.title, (x) => (known(x) ? level(x) + unit() : "–")];
}

function numbersOf(maps, t, c) {
  const { old, now } = evidence(maps, t, c),
    [what, show] = asBefore(maps.run),
    [before, after] = [maps.at(t - 1, c), maps.at(t, c)].map((k) => maps.cells.model[k]);
  const said = [
    known(old) && `model ${before} had ${what} ${show(old)}`,
    known(now) && `model ${after} had ${maps.run.metric} ${number(now, 3)} before training`,
  ].filter(Boolean);
  return said.length ? `: on its new data ${said.join(", ")}` : "";
}

function sentence(text) {
  return text.charAt(0).toUpperCase() + text.slice(1) + (text.endsWith(".") ? "" : ".");
}

function shorten(name, length) {
  return name.length <= length ? name : name.slice(0, length - 1) + "…";
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
