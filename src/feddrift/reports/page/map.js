// The two maps with a column for each time step and a row for each client: the model in use, and its accuracy.
const MAX_MAP_HEIGHT_PX = 620;
const MAX_NAME_LETTERS = 25; // of a client's name beside its row
const MAX_NAME_LETTERS_NARROW = 13;

// Measures a name in the font of the map, in pixels: WN is twice as wide as il.
function measureName(name) {
  const g = document.createElement("canvas").getContext("2d");
  g.font = mapFont();
  return Math.ceil(g.measureText(name).width);
}

const mapFont = () => `12px ${getComputedStyle(document.body).fontFamily}`;

class Maps {
  constructor(stream, run, choose) {
    Object.assign(this, { stream, run, choose, cells: run.cells, n: stream.clients.length, T: run.steps });
    const flags = (name) => new Set(this.cells[name]);
    this.alarms = flags("alarms");
    this.switches = flags("switches");
    this.changes = flags("changes");
    this.nothing = flags("nothing");
    this.absent = flags("absent");
    this.shade = shades(run);
    const scores = this.cells.accuracy.filter((v) => v >= 0).sort((a, b) => a - b);
    const scoreAt = (share) => scores[Math.floor((scores.length - 1) * share)] ?? 0;
    // The worst 1 % of the cells have one colour.
    this.high = !scores.length ? 1000 : score.higher_is_better ? scores[scores.length - 1] : scoreAt(0.99);
    this.low = score.higher_is_better ? Math.max(0, Math.min(scoreAt(0.01), this.high - 50)) : (scores[0] ?? 0);
  }

  // Returns the position of a cell in the arrays of `cells`.
  cellIndex(t, c) {
    return t * this.n + c;
  }

  // Returns the clients in their order from top to bottom.
  sortClients(order) {
    const c = range(this.n),
      { model, accuracy } = this.cells;
    if (order === "similar") {
      const root = (i) => this.cells.roots[model[i]] ?? model[i];
      const compare = (a, b) => {
        for (let t = 0; t < this.T; t++) {
          const gap = root(this.cellIndex(t, a)) - root(this.cellIndex(t, b));
          if (gap) return gap;
        }
        return a - b;
      };
      return c.sort(compare);
    }
    if (order === "worst") {
      const mean = c.map((k) => {
        const values = range(this.T)
          .map((t) => accuracy[this.cellIndex(t, k)])
          .filter((v) => v >= 0);
        return values.length ? (score.higher_is_better ? 1 : -1) * (sum(values) / values.length) : Infinity;
      });
      return c.sort((a, b) => (mean[a] === mean[b] ? a - b : mean[a] - mean[b]));
    }
    return c;
  }

  draw(container, { by, order }) {
    this.rows = this.sortClients(order);
    this.rowOfClient = new Map(this.rows.map((c, i) => [c, i]));
    this.rowHeight = Math.min(26, Math.max(MAX_MAP_HEIGHT_PX / this.n, 0.05));
    this.names =
      this.rowHeight >= 11
        ? shortenNames(this.stream.clients, isNarrow() ? MAX_NAME_LETTERS_NARROW : MAX_NAME_LETTERS)
        : null;
    this.nameWidth = this.names ? Math.min(190, 14 + Math.max(0, ...this.names.map(measureName))) : 46;
    const scale = ramp(this.low, this.high),
      heat = (v) => scale(score.higher_is_better ? v : this.low + this.high - v),
      { model, accuracy, concept } = this.cells;
    const byConcept = by === "concept" && concept,
      blank = rgb(colour("wash"));
    const shade = (i) => (byConcept ? this.shade.concept(concept[i]) : this.shade.model(model[i]));
    const pale = (fill) => fill.map((part, k) => Math.round(0.35 * part + 0.65 * blank[k])); // no new data
    const fillOfCell = (i) => (this.absent.has(i) ? blank : this.nothing.has(i) ? pale(shade(i)) : shade(i));
    const text = (i) => (this.absent.has(i) ? "" : byConcept ? letter(concept[i]) : String(model[i]));
    this.panels = [
      this.panel("Model in use", fillOfCell, text, true),
      this.panel(
        `${heading()} on the next time step`,
        (i) => (accuracy[i] < 0 ? blank : heat(accuracy[i])),
        (i) => (accuracy[i] < 0 ? "" : score.share ? Math.round(accuracy[i] / 10) : (accuracy[i] / 1000).toFixed(1)),
        false,
      ),
    ];
    container.replaceChildren(...this.panels.map((p) => p.box));
    for (const p of this.panels) this.paint(p);
    this.legends(by);
  }

  panel(title, fillOf, textOf, marks) {
    const canvas = h("canvas", { "aria-hidden": "true" });
    const row = h("div", { class: "cursor row", hidden: true }),
      cursor = h("div", { class: "cursor", hidden: true });
    const map = h(
      "div",
      {
        class: "map",
        tabindex: marks ? 0 : null,
        role: marks ? "application" : null,
        "aria-label": marks
          ? `${title}: ${count(this.n, "client")} by ${count(this.T, "time step")}. ` +
            "Arrow keys move from cell to cell; the text below describes the cell."
          : null,
        onkeydown: (e) => this.moveByKey(e),
      },
      canvas,
      row,
      cursor,
    );
    map.addEventListener("mousemove", (e) => this.hover(e, canvas));
    map.addEventListener("mouseleave", () => {
      tip();
      this.showCursor(this.chosen);
    });
    map.addEventListener("click", (e) => {
      const hit = this.findCell(e, canvas);
      if (hit) this.choose(...hit);
    });
    return {
      box: h("div", {}, h("h3", {}, title), map, h("div", { class: "legend-of" })),
      map,
      canvas,
      row,
      cursor,
      fillOf,
      textOf,
      marks,
    };
  }

  paint(p) {
    const width = Math.floor(p.box.getBoundingClientRect().width || 540),
      top = 4,
      bottom = 24;
    const columnWidth = (width - this.nameWidth) / this.T,
      height = top + this.rowHeight * this.n + bottom,
      scale = devicePixelRatio || 1;
    Object.assign(p, { columnWidth, top });
    p.canvas.width = width * scale;
    p.canvas.height = height * scale;
    p.canvas.style.width = width + "px";
    p.canvas.style.height = height + "px";
    const g = p.canvas.getContext("2d");
    g.scale(scale, scale);
    if (this.rowHeight >= 7) this.paintCells(p, g);
    else this.paintDense(p, g);
    g.fillStyle = colour("soft");
    g.font = mapFont();
    g.textAlign = "center";
    g.textBaseline = "top";
    for (const t of times(this.T, width - this.nameWidth, 30)) {
      const middle = this.nameWidth + columnWidth * (t + 0.5),
        half = g.measureText(timeMark(t)).width / 2;
      g.fillText(timeMark(t), Math.min(middle, width - half), top + this.rowHeight * this.n + 8);
    }
    g.textAlign = "right";
    g.textBaseline = "middle";
    if (this.names)
      this.rows.forEach((c, i) => g.fillText(this.names[c], this.nameWidth - 10, top + this.rowHeight * (i + 0.5)));
    else for (const k of ticks(0, this.n, 8)) g.fillText(k || "", this.nameWidth - 10, top + this.rowHeight * k);
  }

  paintCells(p, g) {
    const gap = this.rowHeight > 14 ? 2 : 1,
      font = Math.min(12, this.rowHeight * 0.55);
    const labels = p.columnWidth > 22 && this.rowHeight >= 14;
    g.textAlign = "center";
    g.textBaseline = "middle";
    for (let t = 0; t < this.T; t++) {
      this.rows.forEach((c, i) => {
        const k = this.cellIndex(t, c),
          x = this.nameWidth + p.columnWidth * t,
          y = p.top + this.rowHeight * i,
          shade = p.fillOf(k);
        const w = Math.max(1, p.columnWidth - (p.columnWidth > 6 ? gap : 0)),
          cellHeight = this.rowHeight - gap;
        g.fillStyle = `rgb(${shade})`;
        g.beginPath();
        g.roundRect(x, y, w, cellHeight, Math.min(3, w / 4));
        g.fill();
        if (labels) {
          g.fillStyle = light(shade) ? "rgba(20,22,25,0.86)" : "rgba(255,255,255,0.94)";
          g.font = `500 ${font}px ${getComputedStyle(document.body).fontFamily}`;
          g.fillText(p.textOf(k), x + w / 2, y + cellHeight / 2 + 0.5);
        }
        if (!p.marks) return;
        g.fillStyle = colour("ink");
        if (this.changes.has(k)) g.fillRect(x, y, Math.min(3, w / 3), cellHeight);
        if (this.alarms.has(k)) {
          const size = Math.min(9, cellHeight * 0.5, w * 0.6);
          for (const [fill, edge] of [
            ["paper", 2.5],
            ["alarm", 0],
          ]) {
            // a rim that separates it from any colour of the cell
            g.fillStyle = colour(fill);
            g.beginPath();
            g.moveTo(x + w - size - edge, y);
            g.lineTo(x + w, y);
            g.lineTo(x + w, y + size + edge);
            g.fill();
          }
        }
      });
    }
  }

  // With too many clients for cells, a row is one pixel high; the edges of its cells mark changes and alarms.
  paintDense(p, g) {
    const pixelsPerColumn = Math.max(4, Math.round(p.columnWidth * (devicePixelRatio || 1))),
      edge = Math.max(1, Math.round(pixelsPerColumn / 14));
    const image = new ImageData(this.T * pixelsPerColumn, Math.min(this.n, 4000)),
      pixels = new Uint32Array(image.data.buffer);
    const word = ([r, g, b]) => ((255 << 24) | (b << 16) | (g << 8) | r) >>> 0,
      ink = word(rgb(colour("ink"))),
      red = word(rgb(colour("alarm")));
    for (let i = 0; i < image.height; i++) {
      const c = this.rows[Math.floor(((i + 0.5) * this.n) / image.height)]; // of more than 4000 clients, a sample
      for (let t = 0; t < this.T; t++) {
        const k = this.cellIndex(t, c),
          from = i * image.width + t * pixelsPerColumn;
        pixels.fill(word(p.fillOf(k)), from, from + pixelsPerColumn);
        if (p.marks && this.changes.has(k)) pixels.fill(ink, from, from + edge);
        if (p.marks && this.alarms.has(k)) pixels.fill(red, from + pixelsPerColumn - 2 * edge, from + pixelsPerColumn);
      }
    }
    const small = h("canvas", { width: image.width, height: image.height });
    small.getContext("2d").putImageData(image, 0, 0);
    g.imageSmoothingEnabled = this.rowHeight < 1;
    g.imageSmoothingQuality = "high";
    g.drawImage(small, this.nameWidth, p.top, p.columnWidth * this.T, this.rowHeight * this.n);
  }

  legends(by) {
    const { concept, concepts } = this.cells,
      [left, right] = this.panels.map((p) => p.box.lastChild);
    const what =
      by === "concept" && concept
        ? Object.entries(concepts).map(([k, name]) => [`concept ${name}`, `rgb(${this.shade.concept(+k)})`])
        : this.shade.named.map(([name, fill]) => [name, fill]);
    left.replaceChildren(
      h(
        "div",
        { class: "key" },
        what.map(([text, fill]) => h("span", {}, h("i", { class: "swatch", style: `background:${fill}` }), text)),
        this.changes.size
          ? h(
              "span",
              {},
              h("i", { class: "swatch", style: "width:3px;border-radius:0;background:var(--ink)" }),
              "concept changed",
            )
          : null,
        this.absent.size
          ? h("span", {}, h("i", { class: "swatch", style: "background:var(--wash)" }), "not joined yet")
          : null,
        this.nothing.size > this.absent.size ? h("span", {}, "pale: no new data") : null,
        this.alarms.size
          ? h(
              "span",
              {},
              h("i", { class: "swatch", style: "background:var(--alarm);clip-path:polygon(0 0,100% 0,100% 100%)" }),
              "alarm",
            )
          : null,
      ),
    );
    const heat = ramp(0, 5),
      stops = range(6)
        .map((k) => `rgb(${heat(k)})`)
        .join(",");
    right.replaceChildren(
      h(
        "div",
        { class: "key" },
        h(
          "span",
          {},
          this.scaleLabels()[0],
          h("i", { class: "ramp", style: `background:linear-gradient(90deg,${stops})` }),
          this.scaleLabels()[1],
        ),
        this.cells.accuracy.includes(-2) ? h("span", {}, "last column: not tested yet") : null,
      ),
    );
  }

  // Returns the labels of both ends of the colour scale.
  scaleLabels() {
    const [low, high] = [this.low, this.high].map((v) => level(v / 1000, 0) + unit());
    return score.higher_is_better ? [low + (this.low > 0 ? " or less" : ""), high] : [`${high} or more`, low];
  }

  // Returns the time step and the client under the pointer, or null; at the name of a client, the time step is negative.
  findPlace(event, canvas) {
    const box = canvas.getBoundingClientRect(),
      p = this.panels[0];
    const t = Math.floor((event.clientX - box.left - this.nameWidth) / p.columnWidth),
      i = Math.floor((event.clientY - box.top - p.top) / this.rowHeight);
    return t < this.T && i >= 0 && i < this.n ? [t, this.rows[i]] : null;
  }

  // Returns the time step and the client of the cell under the pointer, or null.
  findCell(event, canvas) {
    const place = this.findPlace(event, canvas);
    return place && place[0] >= 0 ? place : null;
  }

  hover(event, canvas) {
    const hit = this.findPlace(event, canvas);
    if (!hit || (hit[0] < 0 && !this.names)) {
      tip();
      return;
    }
    if (hit[0] < 0) {
      tip(event, nameOf(this.stream, hit[1])); // the name beside the row may be shortened
      return;
    }
    this.showCursor(hit);
    tip(event, ...this.buildTooltip(...hit));
  }

  // The content of the tooltip of a cell.
  buildTooltip(t, c) {
    const k = this.cellIndex(t, c),
      { model, accuracy, concept, loss } = this.cells;
    const pairs = [
      ["model", model[k]],
      [`${score.title}, next step`, testOf(accuracy[k])],
    ];
    if (this.absent.has(k)) pairs.splice(0, 1, ["", "had not joined yet"]);
    if (loss && known(loss[k])) pairs.push([`${this.run.metric} before training`, loss[k].toFixed(3)]);
    if (concept) pairs.push(["concept", letter(concept[k]) + (this.changes.has(k) ? ", changed" : "")]);
    const why = reasons(this, t, c);
    return [
      h("b", {}, `${nameOf(this.stream, c)}, ${timeOf(this.run, t)}`),
      h(
        "div",
        { class: "pairs" },
        pairs.flatMap(([a, b]) => [h("span", {}, a), h("span", {}, String(b))]),
      ),
      ...why.map((text) => h("p", {}, text)),
    ];
  }

  // Shows the cursor at a cell in both maps, or hides it.
  showCursor(hit) {
    for (const p of this.panels) {
      p.row.hidden = p.cursor.hidden = !hit;
      if (!hit) continue;
      const [t, c] = hit,
        y = p.top + this.rowHeight * this.rowOfClient.get(c),
        height = Math.max(this.rowHeight, 3);
      const width = p.columnWidth * this.T;
      p.row.style.cssText = `left:${this.nameWidth}px;width:${width}px;top:${y - 1}px;height:${height + 1}px`;
      const x = this.nameWidth + p.columnWidth * t;
      p.cursor.style.cssText = `left:${x - 2}px;width:${p.columnWidth + 2}px;top:${y - 2}px;height:${height + 2}px`;
    }
  }

  select(t, c) {
    this.chosen = [t, c];
    this.showCursor(this.chosen);
  }

  moveByKey(event) {
    const step = { ArrowLeft: [-1, 0], ArrowRight: [1, 0], ArrowUp: [0, -1], ArrowDown: [0, 1] }[event.key];
    if (!step) return;
    event.preventDefault();
    const [t, c] = this.chosen || [0, this.rows[0]],
      i = this.rowOfClient.get(c) + step[1];
    this.choose(Math.min(this.T - 1, Math.max(0, t + step[0])), this.rows[Math.min(this.n - 1, Math.max(0, i))]);
  }
}
