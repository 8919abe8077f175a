"use strict";
// The tables below the curves: verdicts of probes, the account of time, events.
(() => {
  const { runs } = Report.data, several = runs.length > 1, { create, format } = Report;
  const FIRST = 200;
  const table = (heads, rows, className = "") => {
    const body = create("tbody", {}, ...rows);
    const head = create("tr", {}, ...heads.map(([text, kind]) => create("th", { scope: "col", className: kind ?? "" }, text)));
    return create("table", { className }, create("thead", {}, head), body);
  };
  const cells = (...each) => create("tr", {}, ...each.map(([content, kind]) => create("td", { className: kind ?? "" }, content ?? "")));

  Report.verdicts = () => {
    const rows = [], words = { true: ["● ok", "ok"], false: ["✕ ALARM", "crit"], null: ["○ undecided", ""] };
    for (const run of runs) {
      for (const probe of new Set(run.evaluations.verdicts.map((verdict) => verdict.probe))) {
        const all = run.evaluations.verdicts.filter((verdict) => verdict.probe === probe), newest = all.at(-1), [word, kind] = words[newest.ok];
        const dots = create("span", { className: "dots", title: "oldest to newest" }, all.slice(-40).map((verdict) => words[verdict.ok][0][0]).join(""));
        rows.push(cells([several ? `${run.name}: ${probe}` : probe, "tight"], [word, `tight ${kind}`], [format.whole(newest.at.step), "number"], [dots], [newest.text]));
      }
    }
    const host = document.getElementById("verdicts");
    if (rows.length) host.replaceChildren(create("h3", {}, "Verdicts of probes"), table([["probe"], ["newest"], ["step", "number"], ["all"], ["why"]], rows, "verdicts"));
  };

  Report.accounts = () => {
    const host = document.getElementById("accounts");
    host.replaceChildren(...runs.map((run) => {
      const { states, wall_seconds: wall, goodput, runtime_goodput: without, tokens, tokens_lost: lost, incidents } = run.account;
      const rows = states.filter((state) => state.seconds > 0).map((state) => {
        const [name] = Report.states.find(([, , names]) => names.includes(state.name)), swatch = create("i"), bar = create("span", { className: "share" });
        swatch.style.background = bar.style.background = `var(--s-${name})`;
        bar.style.width = `${Math.max(1, (state.seconds / wall) * 160)}px`;
        return cells([create("span", {}, swatch, state.name), "tight"], [format.span(state.seconds), "number"], [Report.units.share(state.seconds / wall), "number"], [bar], [state.meaning, "meaning"]);
      });
      const text = `${several ? `${run.name}: ` : ""}goodput ${Report.units.share(goodput)} of ${format.span(wall)} (${Report.units.share(without)} without the queue); `
        + `${format.count(tokens)} tokens kept, ${format.count(lost)} lost; ${incidents} interruption${incidents === 1 ? "" : "s"}.`;
      return create("div", {}, create("p", { className: "note" }, text), table([["state"], ["time", "number"], ["share", "number"], [""], ["meaning", "meaning"]], rows, "account"));
    }));
  };

  // ---------------------------------------------------------------- events
  const all = [...Report.events].sort((a, b) => b.at.written - a.at.written);
  const filter = { group: "marked", text: "", every: false };
  const KINDS = { marked: (event) => (event.mark > 0 && event.group !== "progress") || event.severity > 0, worse: (event) => event.severity > 0, all: () => true };
  const found = () => all.filter((event) => (KINDS[filter.group]?.(event) ?? event.group === filter.group)
    && (!filter.text || `${event.kind} ${event.text} ${event.run.name}`.toLowerCase().includes(filter.text)));
  const rowOf = (event) => {
    const show = create("button", { type: "button", className: "link", title: "show it in the curves" }, event.at.step === null ? "show" : format.whole(event.at.step));
    show.addEventListener("click", () => Report.approach(event));
    const kind = several ? `${event.run.name}: ${event.kind}` : event.kind;
    const row = cells([format.date(event.at.written), "tight"], [show, "number"], [`${{ info: "", warn: "▲ ", crit: "◆ " }[event.level]}${kind}`, `tight ${event.level}`], [`${event.text}${event.open ? " (open)" : ""}`]);
    row.event = event;
    return row;
  };
  Report.list = () => {
    const events = found(), shown = filter.every ? events : events.slice(0, FIRST), host = document.getElementById("table");
    host.replaceChildren(table([["time (UTC)"], ["step", "number"], ["event"], ["what"]], shown.map(rowOf)));
    if (shown.length < events.length) {
      const more = create("button", { type: "button" }, `show all ${format.whole(events.length)}`);
      more.addEventListener("click", () => { filter.every = true; Report.list(); });
      host.append(more);
    }
    const left = runs.reduce((sum, run) => sum + run.left_out, 0);
    if (left) host.append(create("p", { className: "note" }, `${format.whole(left)} more are only in the journal.`));
  };
  Report.reveal = (event) => {
    Object.assign(filter, { group: "marked", text: "", every: true });
    Report.filters();
    Report.list();
    const row = [...document.querySelectorAll("#table tr")].find((each) => each.event === event);
    row.classList.add("found");
    row.scrollIntoView({ block: "center" });
  };
  // Zoom in on an event, to a twentieth of the run.
  Report.approach = (event) => {
    const at = Report.onClock(event.run, event.at), [low, high] = Report.extent(), half = (high - low) / 40;
    if (at === null) return;
    Report.zoom(Math.max(low, at - half), Math.min(high, at + half));
    document.getElementById("panels").scrollIntoView();
  };
  Report.filters = () => {
    const form = document.getElementById("filter");
    const groups = [...new Set(all.map((event) => event.group))].sort();
    const group = create("select", { ariaLabel: "Which events" }, create("option", { value: "marked" }, "marked events"), create("option", { value: "worse" }, "warnings and worse"), create("option", { value: "all" }, "all events"), ...groups.map((name) => create("option", { value: name }, name)));
    group.value = filter.group;
    const text = create("input", { type: "search", placeholder: "search", ariaLabel: "Search the events" });
    const change = () => { Object.assign(filter, { group: group.value, text: text.value.toLowerCase(), every: false }); Report.list(); };
    group.addEventListener("change", change);
    text.addEventListener("input", change);
    form.onsubmit = (event) => event.preventDefault();
    form.replaceChildren(group, text);
  };
})();
