"use strict";
// The other panels: events, checkpoints, goodput, evaluations; and the page of all of them.
(() => {
  const { runs, panels } = Report.data, several = runs.length > 1;
  const { create, css, alpha, xAxis, yAxis, shown, place, inView, drawMarks, glyph, BASE, curvePanel, constant } = Report;

  // ---------------------------------------------------------------- events above the curves
  const GROUPS = { start: "starts", end: "ends", change: "changes", alarm: "alarms", save: "saves", evaluation: "evaluations", note: "notes", progress: "progress" };
  const strip = (host) => {
    const groups = Object.keys(GROUPS).filter((group) => Report.events.some((event) => event.group === group && event.mark));
    if (!groups.length) return;
    for (const group of groups) Report.groups[group] ??= { hidden: group === "progress" };
    const visible = () => groups.filter((group) => !Report.groups[group].hidden);
    const { head, body } = Report.frame(host, "Events");
    body.setAttribute("aria-label", "Events over the run; the table at the end of the page lists them");
    const chips = create("div", { className: "keys" });
    head.append(chips);
    for (const group of groups) {
      const total = Report.events.filter((event) => event.group === group && event.mark).length;
      const chip = create("button", { type: "button", className: "key" }, `${GROUPS[group]} `, create("b", {}, String(total)));
      chip.setAttribute("aria-pressed", String(!Report.groups[group].hidden));
      chip.addEventListener("click", () => { Report.groups[group].hidden = !Report.groups[group].hidden; Report.build(); });
      chips.append(chip);
    }
    const rows = visible(), row = (event) => rows.length - rows.indexOf(event.group) - 0.5;
    const draw = (u) => {
      const { ctx } = u, ratio = uPlot.pxRatio;
      ctx.save();
      for (const event of Report.events.filter((each) => shown(each, 1) && rows.includes(each.group))) {
        const x = place(u, event), y = u.valToPos(row(event), "y", true);
        const until = event.until ? place(u, event, event.until) : event.open ? Report.range[1] : null;
        ctx.fillStyle = ctx.strokeStyle = css(BASE[event.level]);
        ctx.lineWidth = 3 * ratio;
        if (until !== null && x !== null && until > Report.range[0] && x < Report.range[1]) {
          ctx.globalAlpha = 0.45;
          ctx.beginPath();
          ctx.moveTo(u.valToPos(Math.max(x, Report.range[0]), "x", true), y);
          ctx.lineTo(u.valToPos(Math.min(until, Report.range[1]), "x", true), y);
          ctx.stroke();
          ctx.globalAlpha = 1;
        }
        if (!inView(x)) continue;
        glyph(ctx, event.level, u.valToPos(x, "x", true), y, 5 * ratio);
        ctx.fill();
      }
      ctx.restore();
    };
    const chart = Report.plot(body, {
      height: rows.length * 22 + 44,
      scales: { y: { range: () => [0, Math.max(1, rows.length)] } },
      axes: [xAxis(true), { ...yAxis((value) => GROUPS[rows[rows.length - Math.round(value + 0.5)]] ?? ""), splits: () => rows.map((_, at) => at + 0.5), grid: { show: false } }],
      series: [{}, { show: true, paths: () => null, points: { show: false } }],
      hooks: { draw: [draw] },
    }, [Report.extent(), [null, null]]);
    const find = (x, y) => {
      const at = chart.posToVal(y, "y");
      return Report.events.filter((event) => shown(event, 1) && rows.includes(event.group) && Math.abs(row(event) - at) < 0.5)
        .map((event) => {
          const from = chart.valToPos(place(chart, event) ?? NaN, "x"), to = event.until ? chart.valToPos(place(chart, event, event.until), "x") : from;
          return [x < from ? from - x : x > to ? x - to : 0, Math.abs(x - from), event];
        })
        .filter(([away]) => away <= 7).sort((a, b) => a[0] - b[0] || a[1] - b[1]).map(([, , event]) => event);
    };
    Report.hover(chart, (x, y) => find(x, y).map(Report.describe));
    chart.over.addEventListener("click", (click) => {
      const box = chart.over.getBoundingClientRect(), [event] = find(click.clientX - box.left, click.clientY - box.top);
      if (event) Report.reveal(event);
    });
  };

  // ---------------------------------------------------------------- checkpoints
  const SAVES = {
    verified: ["--ok", true, "verified"], written: ["--info", false, "written, not verified"], deleted: ["--c6", true, "deleted later, as configured"],
    left: ["--c6", false, "left behind"], damaged: ["--crit", true, "damaged"], lost: ["--crit", false, "lost"], failed: ["--crit", true, "failed"],
  };
  const saves = (host) => {
    const found = runs.flatMap((run) => run.saves.map((save) => ({ ...save, run })));
    if (!found.length) return;
    const { head, body } = Report.frame(host, "Checkpoints", "seconds each took");
    const states = Object.keys(SAVES).filter((state) => found.some((save) => save.state === state));
    const chips = create("div", { className: "keys" });
    for (const state of states) {
      const sign = create("span", {}, { verified: "●", written: "○", deleted: "·", left: "×", damaged: "▲", lost: "✕", failed: "▼" }[state]);
      sign.style.color = css(SAVES[state][0]);
      chips.append(create("span", { className: "key" }, sign, SAVES[state][2], create("b", {}, String(found.filter((save) => save.state === state).length))));
    }
    head.append(chips);
    body.setAttribute("aria-label", `Checkpoints: ${states.map((state) => `${found.filter((save) => save.state === state).length} ${SAVES[state][2]}`).join(", ")}`);
    const top = Math.max(...found.map((save) => save.seconds ?? 0), 1e-3) * 1.15;
    const y = (save) => save.seconds ?? top * 0.06;
    const draw = (u) => {
      const { ctx } = u, ratio = uPlot.pxRatio;
      ctx.save();
      for (const save of found) {
        const x = Report.onClock(save.run, save.at);
        if (!inView(x)) continue;
        const left = u.valToPos(x, "x", true), high = u.valToPos(y(save), "y", true), size = (save.state === "deleted" ? 2.2 : 4.5) * ratio;
        ctx.fillStyle = ctx.strokeStyle = css(several && save.state === "verified" ? `--c${runs.indexOf(save.run) % 8}` : SAVES[save.state][0]);
        ctx.lineWidth = 1.6 * ratio;
        ctx.beginPath();
        if (save.state === "left" || save.state === "lost") {
          ctx.moveTo(left - size, high - size); ctx.lineTo(left + size, high + size); ctx.moveTo(left + size, high - size); ctx.lineTo(left - size, high + size);
          ctx.stroke();
        } else if (save.state === "failed" || save.state === "damaged") {
          const way = save.state === "failed" ? -1 : 1;
          ctx.moveTo(left, high - way * size); ctx.lineTo(left + size, high + way * size); ctx.lineTo(left - size, high + way * size); ctx.fill();
        } else {
          ctx.arc(left, high, size, 0, 7);
          if (SAVES[save.state][1]) ctx.fill(); else ctx.stroke();
        }
      }
      ctx.restore();
    };
    const chart = Report.plot(body, {
      height: 120, scales: { y: { range: () => [0, top] } }, axes: [xAxis(true), yAxis(Report.format.span)],
      series: [{}, { paths: () => null, points: { show: false } }], hooks: { draw: [drawMarks, draw] },
    }, [Report.extent(), [null, null]]);
    Report.hover(chart, (left) => found.map((save) => [Math.abs(chart.valToPos(Report.onClock(save.run, save.at) ?? NaN, "x") - left), save])
      .filter(([away]) => away <= 6).sort((a, b) => a[0] - b[0])
      .map(([, save]) => [`${several ? `${save.run.name}: ` : ""}${SAVES[save.state][2]}`, `step ${Report.format.whole(save.at.step)}, ${Report.format.date(save.at.written)}: ${save.text}`]));
  };

  // ---------------------------------------------------------------- goodput
  Report.states = [
    ["kept", "useful steps", ["step_kept"]], ["slow", "slower than usual", ["step_slow", "warmup"]], ["data", "waiting for data", ["data_wait"]],
    ["save", "waiting for saves", ["ckpt_block"]], ["heldout", "held-out loss", ["heldout"]], ["skipped", "skipped steps", ["step_skipped"]],
    ["lost", "lost steps", ["lost"]], ["restart", "ending and starting", ["detect", "teardown", "launch", "load"]], ["queue", "queue", ["queued"]],
    ["paused", "paused", ["paused"]], ["unknown", "unexplained", ["idle_unknown"]],
  ];
  const goodput = (host, run) => {
    const band = run.bands.find((each) => each.edges[Report.clocks[Report.clock].column]);
    if (!band) return;
    const edges = Report.onClock(run, band.edges), bins = edges.length - 1;
    const groups = Report.states.filter(([, , names]) => names.some((name) => band.seconds[name]));
    const total = Array.from({ length: bins }, (_, bin) => Object.values(band.seconds).reduce((sum, column) => sum + (column[bin] ?? 0), 0));
    let below = new Array(bins).fill(0);
    const stacked = groups.map(([, , names]) => {
      below = below.map((sum, bin) => sum + names.reduce((part, name) => part + (band.seconds[name]?.[bin] ?? 0), 0));
      return [...below.map((sum, bin) => (total[bin] > 0 ? Math.min(1, sum / total[bin]) : null)), null];
    }).map((column) => { column[bins] = column[bins - 1]; return column; });
    const { head, body } = Report.frame(host, `Goodput${several ? ` of ${run.name}` : ""}`, `${Report.units.share(run.account.goodput)} in all`);
    const chips = create("div", { className: "keys" });
    const values = groups.map(([name, label]) => {
      const swatch = create("i"), value = create("b");
      swatch.style.borderTopColor = css(`--s-${name}`); swatch.style.borderTopWidth = "9px";
      chips.append(create("span", { className: "key" }, swatch, label, value));
      return value;
    });
    head.append(chips);
    body.setAttribute("aria-label", `Share of the time in each state; in all ${Report.units.share(run.account.goodput)} goodput`);
    const refresh = (u) => values.forEach((value, at) => {
      const row = u.cursor.idx;
      const share = row == null || stacked[at][row] === null ? null : stacked[at][row] - (at ? stacked[at - 1][row] : 0);
      value.textContent = share === null ? "" : Report.units.share(share);
    });
    // From the top down, so that every fill ends at the one below.
    const order = groups.map((_, at) => groups.length - 1 - at);
    Report.plot(body, {
      height: 130, scales: { y: { range: () => [0, 1] } },
      axes: [xAxis(true), yAxis(Report.units.share)],
      series: [{}, ...order.map((at) => ({
        stroke: () => css("--paper"), width: 0.4, fill: () => css(`--s-${groups[at][0]}`), paths: uPlot.paths.stepped({ align: 1 }), points: { show: false },
      }))],
      bands: order.slice(0, -1).map((_, at) => ({ series: [at + 1, at + 2] })),
      cursor: { points: { show: false } },
      hooks: { draw: [drawMarks], setCursor: [refresh] },
    }, [edges, ...order.map((at) => stacked[at])]);
  };

  // ---------------------------------------------------------------- evaluations
  const evaluation = (host, name, curves) => {
    const [task, metric] = name, tables = curves.map(({ run, curve }) => {
      const points = curve.scores.map((score) => [Report.onClock(run, score.at), score]).filter(([x]) => x !== null).sort((a, b) => a[0] - b[0]);
      const unique = points.filter(([x], at) => at === points.length - 1 || points[at + 1][0] !== x);
      return [unique.map(([x]) => x), unique.map(([, score]) => (score.left ? null : score.value))];
    });
    const all = curves.flatMap(({ run, curve }) => curve.scores.map((score) => ({ ...score, run })));
    const better = curves[0].curve.better, newest = curves.map(({ curve }) => curve.scores.filter((score) => !score.left).at(-1) ?? curve.scores.at(-1));
    const show = Report.units[""], first = newest[0];
    const interval = first.low === null ? "" : ` (${show(first.low)} to ${show(first.high)})`;
    const about = `${several ? "" : `${show(first.value)}${interval}`}${better ? `, ${better} is better` : ""}`.replace(/^, /, "");
    const { body } = Report.frame(host, `${task} ${metric}`, about);
    body.setAttribute("aria-label", `${task} ${metric}: ${about}`);
    const data = tables.length > 1 ? uPlot.join(tables) : tables[0];
    const lows = all.map((score) => score.low ?? score.value), highs = all.map((score) => score.high ?? score.value);
    const [low, high] = [Math.min(...lows), Math.max(...highs)], pad = (high - low || Math.abs(high) || 1) * 0.08;
    const draw = (u) => {
      const { ctx } = u, ratio = uPlot.pxRatio;
      ctx.save();
      for (const score of all) {
        const x = Report.onClock(score.run, score.at);
        if (!inView(x)) continue;
        const left = u.valToPos(x, "x", true), to = (value) => u.valToPos(value, "y", true), name = `--c${runs.indexOf(score.run) % 8}`;
        ctx.strokeStyle = alpha(name, score.left ? 0.4 : 0.75); ctx.fillStyle = css(name); ctx.lineWidth = 1.2 * ratio;
        if (score.low !== null) {
          ctx.beginPath(); ctx.moveTo(left, to(score.low)); ctx.lineTo(left, to(score.high));
          for (const end of [score.low, score.high]) { ctx.moveTo(left - 3 * ratio, to(end)); ctx.lineTo(left + 3 * ratio, to(end)); }
          ctx.stroke();
        }
        ctx.beginPath(); ctx.arc(left, to(score.value), 3 * ratio, 0, 7);
        if (score.left) ctx.stroke(); else ctx.fill();
      }
      ctx.restore();
    };
    const chart = Report.plot(body, {
      height: 140, scales: { y: { range: () => [low - pad, high + pad] } }, axes: [xAxis(true), yAxis(show)],
      series: [{}, ...curves.map(({ run }) => ({ stroke: () => css(`--c${runs.indexOf(run) % 8}`), width: 1.3, spanGaps: true, points: { show: false } }))],
      hooks: { draw: [draw] },
    }, data);
    Report.hover(chart, (left) => all.map((score) => [Math.abs(chart.valToPos(Report.onClock(score.run, score.at) ?? NaN, "x") - left), score])
      .filter(([away]) => away <= 8).sort((a, b) => a[0] - b[0]).map(([, score]) => [
        `${several ? `${score.run.name}: ` : ""}${show(score.value)}`,
        `${score.low === null ? "" : `95% ${show(score.low)} to ${show(score.high)}, `}step ${Report.format.whole(score.at.step)}${score.documents ? `, ${score.documents} documents` : ""}${score.left ? ", left behind" : ""}`]));
  };
  const evaluations = (host) => {
    const table = new Map();
    for (const run of runs)
      for (const curve of run.evaluations.curves) {
        const key = JSON.stringify([curve.task, curve.metric]);
        table.set(key, [...(table.get(key) ?? []), { run, curve }]);
      }
    for (const [key, curves] of table) evaluation(host, JSON.parse(key), curves);
  };

  // ---------------------------------------------------------------- the page
  Report.build = () => {
    for (const chart of Report.charts.splice(0)) chart.destroy();
    Report.range ??= Report.extent();
    Report.fine = Report.isFine(Report.range);
    const host = document.getElementById("panels"), grid = document.querySelector("#evaluations .grid");
    const scroll = window.scrollY, height = document.body.offsetHeight;
    document.body.style.minHeight = `${height}px`; // so that rebuilding does not scroll
    host.replaceChildren();
    grid.replaceChildren();
    strip(host);
    const constants = [];
    for (const panel of panels) {
      const text = constant(panel);
      if (text === null) curvePanel(host, panel);
      else if (text) constants.push(text);
      if (panel.name === "seconds") for (const run of runs) goodput(host, run);
    }
    saves(host);
    if (constants.length) host.append(create("p", { className: "constants" }, `Constant: ${constants.join("; ")}.`));
    document.getElementById("evaluations").hidden = !runs.some((run) => run.evaluations.curves.length || run.evaluations.verdicts.length);
    evaluations(grid);
    document.body.style.minHeight = "";
    window.scrollTo(0, scroll);
  };
})();
