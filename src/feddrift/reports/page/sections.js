// The sections of the page, from top to bottom.

const MAX_NAMED_METHODS = 4; // in the title

const joinParts = (parts) => parts.filter(Boolean).join("  ·  ");

// The title of a stream: its name, and the methods that were compared on it.
function titleOf(stream) {
  const names = [...new Set(stream.groups.map((g) => g.algorithm))],
    listed = names.length > MAX_NAMED_METHODS ? names.slice(0, MAX_NAMED_METHODS - 1) : names,
    last = names.length > listed.length ? `${names.length - listed.length} more methods` : listed.pop();
  return `${stream.short}: ${listed.length ? `${listed.join(", ")} and ${last}` : last}`;
}

// The verdict and the title of a stream. Commands in a text are between backquotes.
function lead() {
  const { run, stream } = view;
  const isOpen = run.n_steps === null && run.status !== "complete"; // the number of time steps is not fixed
  fill("headline", titleOf(stream));
  fill(
    "eyebrow",
    joinParts([
      count(stream.n_clients, "client"),
      isOpen ? null : count(run.n_steps || run.steps, "time step"),
      count(sum(stream.groups.map((g) => g.runs.length)), "run"),
    ]),
  );
  const paragraph = (text) => h("p", {}, text.split("`").map((part, i) => (i % 2 ? h("code", {}, part) : part)));
  $("verdict").hidden = !stream.verdicts.length;
  fill("verdict", h("h2", {}, "Verdict"), stream.verdicts.map(paragraph));
}

// The summary of the chosen run, and the remarks on all methods of the stream.
function summary() {
  const { run, stream, group } = view;
  const of = run.n_steps === null ? "" : ` of ${run.n_steps}`,
    steps = run.n_steps === null ? count(run.steps, "time step") : `${run.steps}${of} time steps`,
    status = run.status === "complete" ? "complete" : `${run.status}: ${steps}`;
  fill("h-run", `${group.label}, seed ${run.seed}`);
  fill("run-line", joinParts([status, `started ${clock(run.started).slice(0, 16)}`]));
  fill("gist", summariseRun(view));
  fill("tiles", buildTiles(view));
  fill(
    "remarks",
    stream.remarks.map((text) => h("li", {}, text)),
  );
}

function accuracy() {
  const { stream, group } = view,
    few = stream.groups.length <= 6;
  const ends = { Oracle: ["var(--ink)", "5 4"], Oblivious: ["var(--soft)", "2 4"] };
  const lines = stream.groups.map((g, i) => {
    const own = g === group,
      [stroke, dash] = ends[g.algorithm] || [
        few || view.strong.has(g.label) || own ? paint(own ? 0 : 1 + (i % 7)) : "var(--faint)",
        null,
      ];
    const strong = own || few || g.algorithm in ends || view.strong.has(g.label);
    return {
      name: g.label,
      values: g.mean,
      stroke: own ? "var(--m0)" : stroke,
      dash: own ? null : dash,
      strong,
      low: g.std && g.mean.map((v, t) => (known(v) && known(g.std[t]) ? v - g.std[t] : null)),
      high: g.std && g.mean.map((v, t) => (known(v) && known(g.std[t]) ? v + g.std[t] : null)),
    };
  });
  fill(
    "accuracy",
    lineChart(lines, {
      width: widthOf("accuracy", 1116),
      height: isNarrow() ? 250 : 330,
      maxLabelWidth: 300,
      label: `${heading()} over time by algorithm`,
      xlabel: "time",
      show: (v) => (score.share ? `${Math.round(100 * v)} %` : number(v)),
      floor: 0,
      ceiling: score.share ? 1.004 : null,
    }),
  );
  fill("h-accuracy", `${heading()} over time`);
  const seeds = [...new Set(stream.groups.map((g) => g.runs.length))].sort((a, b) => a - b);
  fill(
    "accuracy-note",
    "Mean over clients, tested on the time step after the last one of training. " +
      (seeds[seeds.length - 1] > 1
        ? `Lines are means over ${seeds.join(" or ")} seeds; bands show one standard deviation.`
        : "Each method has one seed."),
  );
  fill(
    "accuracy-legend",
    few
      ? []
      : stream.groups
          .filter((g) => g !== group && !(g.algorithm in ends))
          .map((g) =>
            h(
              "button",
              {
                type: "button",
                "aria-pressed": String(view.strong.has(g.label)),
                title: g.summary,
                onclick: () => {
                  view.strong.delete(g.label) || view.strong.add(g.label);
                  accuracy();
                },
              },
              g.label,
            ),
          ),
  );
}

function maps() {
  const { stream, run, maps: map } = view,
    n = stream.clients.length;
  $("below-map").hidden = $("map").hidden = !map;
  if (!map) {
    fill("map-controls");
    fill(
      "map-note",
      run.steps
        ? "The map of this run is left out to keep the page small. To see it, make a page of its record alone."
        : "No time step is done yet.",
    );
    return;
  }
  const sampled = isSample(stream)
    ? `The map and the lists show an even sample of ${n.toLocaleString("en")} of ${count(stream.n_clients, "client")}; ` +
      "numbers and curves include all clients. "
    : "";
  fill(
    "map-note",
    sampled +
      "A row is a client, a column is a time step. The first map has the model in use; merged models have one colour. " +
      `The second has the ${score.title} of that model on the next time step. ` +
      (n > 60 && view.order === "similar" ? "Rows with the same history are adjacent. " : "") +
      "Point at a cell to see the reasons.",
  );
  const segments = (label, name, options) =>
    h(
      "label",
      {},
      label,
      h(
        "span",
        { class: "segments", role: "group", "aria-label": label },
        options.map(([value, text]) =>
          h(
            "button",
            {
              type: "button",
              "aria-pressed": String(view[name] === value),
              onclick: () => {
                state.write({ [name]: value });
                view[name] = value;
                maps();
              },
            },
            text,
          ),
        ),
      ),
    );
  const names = h("datalist", { id: "names" }, n <= 2000 ? stream.clients.map((c) => h("option", { value: c })) : []);
  const find = h("input", {
    list: "names",
    placeholder: "name",
    size: 12,
    "aria-label": "Find a client",
    onchange: (e) => {
      const c = stream.clients.indexOf(e.target.value.trim());
      if (c >= 0) view.choose(view.chosen[0], c);
    },
  });
  fill(
    "map-controls",
    map.cells.concept
      ? segments("Colour", "by", [
          ["model", "model"],
          ["concept", "true concept"],
        ])
      : null,
    segments("Order", "order", [
      ["given", "as given"],
      ["similar", "similar together"],
      ["worst", "worst first"],
    ]),
    h("label", {}, "Find client", find, names),
  );
  map.draw($("map"), view);
  const lineage = lineageChart(map, { width: $("lineage").getBoundingClientRect().width || 536, left: map.nameWidth });
  fill("lineage", lineage.svg);
  fill(
    "lineage-note",
    `${count(lineage.all, "model")} in total. A ring is the creation of a model; a thin line leads there from the model ` +
      "that it was copied from. A curve into another row is a merge. The thickness is the share of clients." +
      (lineage.folded ? " Models that were created and merged together share a row, +n." : "") +
      (lineage.hidden ? ` Not shown: ${count(lineage.hidden, "model")} with the fewest clients.` : ""),
  );
  map.select(...view.chosen);
  fill("story", buildHistory(view));
}

// Explains terms that only the reasons of some methods have.
function explainTerms(run) {
  const has = (text) => run.events.some((e) => e.why.includes(text));
  return (
    (has("predicted correctly only")
      ? " In a reason, p is the probability that chance alone gives such evidence: a higher error, rows that only one of " +
        "two models predicts correctly, or both together."
      : "") + (has(" on trunk ") ? " A trunk is the first layers of a model, which several models may share." : "")
  );
}

function drifts() {
  const { run } = view,
    d = run.detection.noticed;
  fill("h-drifts", run.drifts ? "Drifts, and what was noticed" : "Alarms and switches");
  fill(
    "drifts-note",
    run.drifts
      ? "A drift is noticed if the client raises an alarm or switches to another model in the time step of the drift or " +
          `up to ${count(view.data.within, "time step")} later. Every other alarm or switch is a false move. ` +
          "Dummies ignore the data; a useful detector is better than all of them." +
          explainTerms(run)
      : "The true concepts are unknown, so it is unknown which of these moves were right. " +
          "Each row has the scores and the reason." +
          (groupCommonAlarms(run).size ? " Alarms of one time step at which the data changed as at most clients share a row." : "") +
          explainTerms(run),
  );
  $("drifts-pair").hidden = !d;
  if (d) {
    const b = run.by_time,
      series = [
        ["noticed at once", b["at once"], "var(--good)"],
        ["noticed late", b.late, "var(--late)"],
        ["missed", b.missed, "var(--alarm)"],
        ["false moves", b.false.map((v) => -v), "var(--other)"],
      ];
    fill(
      "drifts-chart",
      barChart(
        series.map(([name, values, fill]) => ({ name, values, fill })),
        { width: widthOf("drifts-chart", 536), height: 230, label: "Drifts over time", xlabel: "time" },
      ),
      key(series.map(([name, , fill]) => [name + (name === "false moves" ? " (below the line)" : ""), fill])),
    );
    fill("detection", detectionTable(view));
  }
  fill("drifts-list", driftList(view));
}

function recovery() {
  const { stream, group, data } = view;
  const chosen = stream.groups.filter(
    (g) => g.around && (g === group || ["Oracle", "Oblivious"].includes(g.algorithm)),
  );
  fill("worst", worstTable(view));
  fill(
    "worst-note",
    (isSample(stream) ? "Among the clients of the sample. " : "") +
      `By mean ${score.title} over time. All lines have the same scale, that of the map's colours; values beyond it are ` +
      "drawn at its edge.",
  );
  $("recovery-part").hidden = !view.run.truth; // it is measured from true drifts
  if (!group.around) {
    fill("recovery-note", "No drift yet.");
    fill("recovery");
    return;
  }
  const [lost, oracle] = [group.numbers.lost[0], (group.numbers.lost_to_oracle || [null])[0]];
  fill(
    "recovery-note",
    `Mean ${score.title} around a drift, over all drifts and seeds. ` +
      "At 0, a model of the old concept is tested on data of the new one. " +
      (known(lost)
        ? `Lost per drift, summed over time steps: ${number(lost)} compared with the level before` +
          (known(oracle) && group.algorithm !== "Oracle" ? `, ${number(oracle)} compared with Oracle.` : ".")
        : ""),
  );
  const stroke = (g) => (g === group ? "var(--m0)" : g.algorithm === "Oracle" ? "var(--ink)" : "var(--soft)");
  fill(
    "recovery",
    lineChart(
      chosen.map((g) => ({
        name: g.algorithm,
        values: g.around,
        stroke: stroke(g),
        strong: true,
        dash: g === group ? null : g.algorithm === "Oracle" ? "5 4" : "2 4",
      })),
      {
        width: widthOf("recovery", 536),
        height: 250,
        label: `${heading()} around a drift`,
        xlabel: "time steps since the drift",
        show: (v) => (score.share ? `${Math.round(100 * v)} %` : number(v)),
        showX: (k) => k - data.before,
        xs: range(group.around.length),
        floor: 0,
        ceiling: score.share ? 1.004 : null,
        marks: data.before,
      },
    ),
  );
}

// Explains the column of differences, if there is one.
function describeBaseline() {
  const { stream, data } = view;
  if (!stream.groups.some((g) => g.against)) return "";
  return (
    ` Over ${data.against}: the mean difference seed by seed${score.share ? " in points" : ""}, with its 95 % interval` +
    `${score.higher_is_better ? "" : "; a negative difference is better"}. If the interval contains 0, the difference ` +
    "is within noise."
  );
}

function resources() {
  const { run, group } = view,
    x = run.numbers;
  const lines = [
    { name: "in use", values: run.used, stroke: "var(--m0)", strong: true },
    { name: "in existence", values: run.exist, stroke: "var(--m5)", dash: "2 4", strong: true },
  ];
  if (run.concepts)
    lines.push({ name: "concepts", values: run.concepts, stroke: "var(--ink)", dash: "5 4", strong: true });
  fill(
    "models",
    lineChart(lines, {
      width: widthOf("models", 536),
      height: 230,
      label: "Models over time",
      xlabel: "time",
      floor: 0,
      whole: true,
    }),
  );
  fill(
    "models-note",
    known(x.spare)
      ? `On average, the number of models in use was ${number(Math.abs(x.spare))} ${x.spare < 0 ? "below" : "above"} ` +
          "that of current concepts."
      : "Models that at least one client uses, and all models that the server keeps.",
  );
  fill(
    "sent",
    barChart([{ name: "", values: run.sent, fill: "var(--m0)" }], {
      width: widthOf("sent", 536),
      height: 230,
      label: "Models sent",
      xlabel: "time",
      show: (v) => number(v, 1) + "×",
      line: 1,
    }),
  );
  const phases = [
    ["first", "first step"],
    ["drift", "steps with an alarm, a new model or a merge"],
    ["quiet", "quiet steps"],
  ].filter(([p]) => known(x[`sent ${p}`]));
  fill(
    "sent-note",
    "Relative to one shared model (dashed line): " +
      phases.map(([p, text]) => `${text} ${number(x[`sent ${p}`])}×`).join(", ") +
      "." +
      (known(x["bytes training"])
        ? ` Total: ${megabytes(x["bytes training"])} MB for training and ${megabytes(x["bytes scoring"])} MB for scoring.`
        : ""),
  );
  fill(
    "compare-note",
    "All methods that were run on these data, with means over seeds. The shaded row is the run above. Click the head of a column to sort by it, the best " +
      "first; click again to reverse the order." +
      describeBaseline() +
      (run.truth
        ? " Precision, recall and delay count alarms and switches. A method that is always inaccurate loses little at a " +
          "drift, so compare lost per drift with lost to Oracle."
        : ""),
  );
  fill("compare", comparison(view));
  fill("command", run.command);
  fill(
    "command-notes",
    run.notes.map((note) => h("li", {}, note)),
  );
  fill(
    "config",
    Object.entries(run.config).map(([k, v]) => h("div", {}, h("dt", {}, k), h("dd", {}, v))),
  );
  fill(
    "foot",
    `${view.data.name}: made at ${view.data.made.replace("T", " ").slice(0, 16)} UTC by feddrift ` +
      `${view.data.version} from ${count(sum(view.data.streams.flatMap((x) => x.groups.map((g) => g.runs.length))), "record")}. ` +
      (group.summary ? `${group.algorithm}: ${group.summary}.` : ""),
  );
}
