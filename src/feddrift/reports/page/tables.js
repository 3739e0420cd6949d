// Tables. A column head is [text, kind, title, sort, aria-sort]; with `sort` it is a button.
const REACTION_NAMES = ["", "alarm", "switch", "alarm and switch"];
const AS_AT_MOST_CLIENTS = "as at most clients"; // alarms of a time step that share a row
const MAX_LINKED_CLIENTS = 100; // in such a row

function table(head, rows, caption) {
  return h(
    "table",
    {},
    caption ? h("caption", {}, caption) : null,
    h(
      "thead",
      {},
      h(
        "tr",
        {},
        head.map(([text, kind, title, sort, sorted]) =>
          h(
            "th",
            { class: kind, scope: "col", title, "aria-sort": sorted },
            sort ? h("button", { type: "button", class: "sort", onclick: sort }, text) : text,
          ),
        ),
      ),
    ),
    h("tbody", {}, rows),
  );
}

const cells = (values, kinds = []) =>
  values.map((value, i) => h("td", { class: kinds[i] }, value instanceof Node ? value : String(value)));

// Formats [mean, standard deviation].
function formatSpread(spread, show) {
  if (!spread || !known(spread[0])) return "–";
  return h("span", {}, show(spread[0]), known(spread[1]) ? h("span", { class: "sd" }, ` ± ${show(spread[1])}`) : null);
}

// Finds the run of another algorithm with the same seed and net.
function findSameRun(stream, name, { seed, net }) {
  const groups = stream.groups.filter((g) => g.algorithm === name);
  const run = groups.flatMap((g) => g.runs).find((r) => r.seed === seed && r.net === net);
  return run || null;
}

function detectionTable(view) {
  const { run, stream, group } = view,
    d = run.detection,
    within = view.data.within;
  const head = [
    ["", "text"],
    ["precision"],
    ["recall"],
    ["delay", "", `mean number of time steps; ${within + 1} for a missed drift`],
    ["moves", "", "alarms and switches"],
    ["false", "", "moves without a drift"],
    ["missed", "", "drifts without a move"],
  ];
  const exact = (x) => (Number.isInteger(x) ? String(x) : x.toFixed(1));
  const line = (name, v, kind) =>
    h(
      "tr",
      { class: kind },
      cells([
        name,
        number(v.precision),
        number(v.recall),
        number(v.delay),
        exact(v.alarms),
        exact(v.alarms - v.hits),
        exact(v.changes - v.hits),
      ]),
    );
  const rows = [
    line(group.algorithm, d.noticed, "self"),
    line("its alarms alone", d.alarms, "dummy"),
    line("its switches alone", d.switches, "dummy"),
  ];
  for (const name of ["Oracle", "Oblivious"]) {
    const other = name === group.algorithm ? null : findSameRun(stream, name, run);
    if (other && other.detection.noticed) rows.push(line(name, other.detection.noticed));
  }
  rows.push(line("Dummy: at random", d.chance), line("Dummy: always", d.always), line("Dummy: never", d.never));
  return table(head, rows);
}

// The number of seeds in which this alarm was raised, if there are several.
function agreement({ group }, t, c, how) {
  if (!group.alarms) return [];
  return [how & ALARM ? `${group.alarms[`${t},${c}`] || 0} of ${group.runs.length}` : "–"];
}

// The columns with the scores of a move, [name, title, show, key of `evidence`]; none without cells.
function moveColumns({ run, maps }) {
  const [what, show, unitOfTest] = testBefore(run);
  const columns = [
    [`${what}, old model${unitOfTest ? ", %" : ""}`, "of the client's previous model on its new data", show, "old"],
    [`${run.metric}, new model`, "of the client's new model on the same data, before training", (x) => number(x, 3), "now"],
    [`${score.title} next${score.share ? ", %" : ""}`, "of the client's new model on the next time step", level, "next"],
  ];
  return maps ? columns.filter(([, , , which]) => which !== "now" || maps.cells.loss) : [];
}

// Formats the lowest and the highest of a few values; "–" if none is known.
function formatRange(values, show) {
  const ends = values.filter(known).sort((a, b) => a - b);
  if (!ends.length) return "–";
  const [low, high] = [ends[0], ends[ends.length - 1]].map((v) => show(v));
  return low === high ? low : [low, high].sort((a, b) => a - b).join(" to ");
}

// Returns the row for several alarms of a time step at which the data changed as at most clients.
function buildCommonRow(view, t, alarms) {
  const { run, group } = view,
    nSwitches = alarms.filter(([, , how]) => how & SWITCH).length,
    scores = alarms.map(([, c]) => (view.maps ? evidence(view.maps, t, c) : {}));
  const why =
    `${count(alarms.length, "alarm")}: the data changed as at most clients, for example with a season ` +
    `(${run.causes[t]}). Whether the rule changed too is seen from the scores.` +
    (nSwitches ? ` ${count(nSwitches, "client")} changed to another model.` : "");
  return {
    t,
    c: alarms[0][1],
    clients: alarms.map(([, c]) => c),
    kind: AS_AT_MOST_CLIENTS,
    values: () => [
      ...(run.drifts ? ["no change", h("span", { class: "tag bad" }, "false")] : []),
      "alarms",
      ...(group.alarms
        ? [
            `${formatRange(
              alarms.map(([, c]) => group.alarms[`${t},${c}`] || 0),
              String,
            )} of ${group.runs.length}`,
          ]
        : []),
      ...moveColumns(view).map(([, , show, which]) =>
        formatRange(
          scores.map((values) => values[which]),
          show,
        ),
      ),
      why,
    ],
  };
}

// Returns by time step the alarms at which the data changed as at most clients, where they are several.
function groupCommonAlarms(run) {
  const alarms = new Map();
  for (const alarm of run.false.filter((f) => f[2] & COMMON_CAUSE))
    alarms.set(alarm[0], [...(alarms.get(alarm[0]) || []), alarm]);
  return new Map([...alarms].filter(([, group]) => group.length > 1));
}

// The rows of all drifts and false moves in order of time.
function driftRows(view) {
  const { run } = view,
    rows = [];
  const reason = (t, c) => (view.maps ? reasons(view.maps, t, c, false).join(" ") : eventsOf(run, t, c));
  const numbers = (t, c) => moveColumns(view).map(([, , show, which]) => show(evidence(view.maps, t, c)[which]));
  for (const [t, c, from, to, delay, how] of run.drifts || []) {
    const tag =
      delay < 0
        ? h("span", { class: "tag bad" }, "missed")
        : h("span", { class: `tag ${delay ? "late" : "good"}` }, delay ? `${count(delay, "step")} late` : "at once");
    rows.push({
      t,
      c,
      kind: delay < 0 ? "missed" : delay ? "late" : "at once",
      values: () => [
        `${letter(from)} → ${letter(to)}`,
        tag,
        delay < 0 ? "–" : REACTION_NAMES[how],
        ...agreement(view, t + Math.max(delay, 0), c, how),
        ...numbers(t + Math.max(delay, 0), c),
        delay >= 0
          ? reason(t + delay, c)
          : view.maps
            ? `It kept model ${view.maps.cells.model[view.maps.cellIndex(t, c)]}.`
            : "",
      ],
    });
  }
  const shared = groupCommonAlarms(run);
  for (const [t, c, kinds] of run.false) {
    if (kinds & COMMON_CAUSE && shared.has(t)) continue;
    const how = kinds & (ALARM | SWITCH);
    rows.push({
      t,
      c,
      kind: run.drifts ? "false" : REACTION_NAMES[how],
      values: () => [
        ...(run.drifts ? ["no change", h("span", { class: "tag bad" }, "false")] : []),
        REACTION_NAMES[how],
        ...agreement(view, t, c, how),
        ...numbers(t, c),
        reason(t, c),
      ],
    });
  }
  rows.push(...[...shared].map(([t, alarms]) => buildCommonRow(view, t, alarms)));
  return rows.sort((a, b) => a.t - b.t || a.c - b.c);
}

function driftList(view, show = 12, only = "all") {
  const cut = (view.run.n_drifts || 0) > (view.run.drifts || []).length || view.run.n_false > view.run.false.length;
  const all = driftRows(view),
    kinds = [...new Set(all.map((r) => r.kind))];
  const rows = all.filter((r) => only === "all" || r.kind === only);
  if (!all.length) return [h("p", { class: "note" }, "There was no drift, no alarm and no switch.")];
  const link = (t, c) => linkClient(view, t, c);
  const open = (r) => (r.clients && r.clients.length > 1 ? listClients(r.clients, (c) => link(r.t, c)) : link(r.t, r.c));
  const head = [
    ["time", "text"],
    ["client", "text"],
    ...(view.run.drifts
      ? [
          ["concept", "text"],
          ["noticed", "text"],
        ]
      : []),
    ["by", "text"],
    ...(view.group.alarms ? [["alarm in seeds", "text"]] : []),
    ...moveColumns(view).map(([name, title]) => [name, "", title]),
    ["why", "text"],
  ];
  const kind = [...head.slice(0, -1).map(([, of], i) => (i === 1 ? "text client" : `${of} tight`)), "text wide"];
  const { times } = view.run,
    when = (t) => (!times[t] ? t + 1 : isNarrow() ? stackTime(t, times[t]) : `${t + 1} · ${times[t]}`);
  const again = (n, what) => fill("drifts-list", driftList(view, n, what));
  const filter = h(
    "div",
    { class: "segments" },
    ["all", ...kinds].map((what) =>
      h(
        "button",
        { type: "button", "aria-pressed": String(what === only), onclick: () => again(show, what) },
        `${what} ${what === "all" ? all.length : all.filter((r) => r.kind === what).length}`,
      ),
    ),
  );
  return [
    kinds.length > 1 ? h("div", { class: "controls" }, filter) : null,
    table(
      isNarrow() ? head.slice(0, -1) : head,
      rows.slice(0, show).flatMap((r) => buildMoveRows([when(r.t), open(r), ...r.values()], kind)),
    ),
    cut
      ? h(
          "p",
          { class: "note" },
          `The list contains only the first ${count((view.run.drifts || []).length, "drift")} and the first ` +
            `${count(view.run.false.length, "other move")}.`,
        )
      : null,
    rows.length > show
      ? h(
          "div",
          { class: "more" },
          h("button", { type: "button", onclick: () => again(show * 4, only) }, "Show more"),
          `${show} of ${rows.length}`,
        )
      : null,
  ];
}

const stackTime = (t, name) => h("span", {}, `${t + 1} `, h("span", { class: "called" }, name));

// Returns the row of a move; on a narrow screen, the last value has a row of its own.
function buildMoveRows(values, kinds) {
  if (!isNarrow()) return [h("tr", {}, cells(values, kinds))];
  const why = h("td", { class: "text", colspan: values.length - 1 }, h("p", { class: "below" }, values.at(-1)));
  return [h("tr", { class: "with-next" }, cells(values.slice(0, -1), kinds)), h("tr", {}, why)];
}

// A button with the name of a client that opens one of its cells in the map.
function linkClient(view, t, c) {
  const name = nameOf(view.stream, c);
  return h(
    "button",
    { type: "button", class: "link", title: name, onclick: () => view.choose(t, c, true) },
    isNarrow() ? shortenMiddle(name, 20) : name,
  );
}

// A list of clients that is closed at first.
function listClients(clients, link) {
  const n = clients.length - MAX_LINKED_CLIENTS;
  return h(
    "details",
    { class: "clients" },
    h("summary", {}, count(clients.length, "client")),
    clients.slice(0, MAX_LINKED_CLIENTS).map(link),
    n > 0 ? h("span", {}, `and ${n.toLocaleString("en")} more`) : null,
  );
}

function worstTable(view) {
  const { run, stream, maps } = view,
    oracle = view.group.algorithm === "Oracle" ? null : findSameRun(stream, "Oracle", run);
  const theirs =
    oracle && oracle.cells && run.cells && oracle.steps === run.steps
      ? (c) => {
          const values = range(run.steps)
            .map((t) => oracle.cells.accuracy[t * stream.clients.length + c])
            .filter((v) => v >= 0);
          return values.length ? sum(values) / values.length / 1000 : null;
        }
      : null;
  const head = [
    ["client", "text"],
    [`mean${score.share ? ", %" : ""}`],
    ...(theirs ? [[`Oracle${score.share ? ", %" : ""}`]] : []),
    ["worst at time"],
    ...(maps ? [["over time", "text"]] : []),
  ];
  const rows = run.worst.slice(0, 8).map(([c, mean, low]) =>
    h(
      "tr",
      {},
      cells(
        [
          linkClient(view, low, c),
          level(mean),
          ...(theirs ? [level(theirs(c))] : []),
          run.times[low] || low + 1,
          ...(maps ? [spark(maps, c, isNarrow() ? 84 : 150)] : []),
        ],
        ["text client", "", ...(theirs ? [""] : []), "", "text"],
      ),
    ),
  );
  return table(head, rows);
}

// [text, name, show, title, whether lower is better]
const COLUMNS = [
  ["mean", "mean", level, "mean over clients and time steps"],
  ["", "against", formatDifference, "mean difference, seed by seed, and its 95 % interval"],
  ["omitting drifts", "omitting", level, "without the tests in which the concept has just changed"],
  ["worst client", "worst", level],
  ["10th pct.", "tenth", level, "10th percentile over clients, from the worst"],
  ["accuracy, %", "accuracy", percent, "share of correct predictions"],
  ["majority, %", "majority", percent, "accuracy of each client's most frequent class so far"],
  ["log loss", "log_loss", (x) => number(x, 3), "of the probabilities; lower is better", true],
  ["Brier", "brier", (x) => number(x, 3), "Brier score of the probabilities; lower is better", true],
  ["AUC, %", "auc", percent, "area under the ROC curve, one class against the rest"],
  ["balanced, %", "balanced_accuracy", percent, "accuracy if all classes were equally frequent"],
  ["F1, %", "f1", percent, "mean over classes"],
  ["precision", "noticed precision", number],
  ["recall", "noticed recall", number],
  ["delay", "noticed delay", number, "", true],
  ["lost to Oracle", "lost_to_oracle", number, "per drift, summed over time steps", true],
  ["lost per drift", "lost", number, "summed over time steps, compared with the client's level before the drift", true],
  ["ARI", "ari", number],
  ["NMI", "nmi", number],
  ["spare models", "spare", number, "models in use minus current concepts", true],
  ["sent", "sent", number, "models sent, relative to one shared model", true],
  ["MB trained", "bytes training", megabytes, "total of parameters to and from clients for training", true],
  ["MB scored", "bytes scoring", megabytes, "total of parameters to clients for evaluation", true],
];
const OF_SCORE = ["mean", "against", "omitting", "worst", "tenth"];

// Formats [mean, low, high] of a difference, with its sign.
function formatDifference(gap) {
  if (!gap) return "–";
  const signed = (x) => (x < 0 ? "-" : "+") + Math.abs(x).toFixed(score.share ? 2 : 4),
    [mean, low, high] = gap;
  return h(
    "span",
    {},
    signed(mean),
    known(low) ? h("span", { class: "sd" }, ` [${signed(low)}, ${signed(high)}]`) : null,
  );
}

// The value of a column for a configuration: a number, or null if it is unknown.
function valueOf(group, name) {
  const spread = name === "against" ? group.against : group.numbers[name];
  return spread ? spread[0] : null;
}

// Returns true if a lower value of a column is better.
function lowerIsBetter(name) {
  return OF_SCORE.includes(name) ? !score.higher_is_better : Boolean(COLUMNS.find((column) => column[1] === name)[4]);
}

// Sorts the groups by a column, the best first unless the order is reversed; unknown values are last.
function ranked(groups, name, turned) {
  const value = (g) => valueOf(g, name),
    sign = lowerIsBetter(name) === turned ? -1 : 1;
  return groups
    .slice()
    .sort((a, b) => known(value(b)) - known(value(a)) || (known(value(a)) ? sign * (value(a) - value(b)) : 0));
}

function comparison(view) {
  const { stream, group } = view;
  const columns = COLUMNS.filter(
    ([, name]) => name !== score.name && stream.groups.some((g) => known(valueOf(g, name))),
  );
  const [by, turned] = columns.some(([, name]) => name === view.sort[0]) ? view.sort : ["mean", false];
  const rows = ranked(stream.groups, by, turned).map((g) =>
    h(
      "tr",
      { class: g === group ? "self" : null },
      cells([
        g === group ? g.label : h("button", { type: "button", class: "link", onclick: () => view.open(g) }, g.label),
        g.runs.length,
        ...columns.map(([, name, show]) =>
          name === "mean" ? formatSpread(g.numbers[name], show) : show(name === "against" ? g.against : valueOf(g, name)),
        ),
      ]),
    ),
  );
  const d = view.run.detection,
    dummy = (name, v) =>
      h(
        "tr",
        { class: "dummy" },
        cells([name, "", ...columns.map(([, key]) => (key.startsWith("noticed ") ? number(v[key.slice(8)]) : ""))]),
      );
  if (d.noticed) rows.push(dummy("Dummy: always", d.always), dummy("Dummy: never", d.never));
  const points = score.share ? ", points" : "",
    heads = { mean: score.title + (score.share ? ", %" : ""), against: `over ${view.data.against}${points}` };
  const named = (text, name) => heads[name] || text;
  const order = (name) => (name !== by ? null : lowerIsBetter(name) === turned ? "descending" : "ascending");
  return table(
    [
      ["", "text"],
      ["seeds"],
      ...columns.map(([text, name, , title]) => [named(text, name), "", title, () => view.sortBy(name), order(name)]),
    ],
    rows,
  );
}
