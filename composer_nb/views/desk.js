// The desk of a run. It draws what `views/dashboard.py` answers: in JupyterLab anywidget calls `render`, on the page `live.py` does.
const node = (tag, properties = {}, ...children) => {
  const element = Object.assign(document.createElement(tag), properties)
  element.append(...children)
  return element
}
const EXAMPLES = ["advantage < -.5", "not solved and calls >= 12", "/Error/", "solved and reward < .5"]
const short = (value) => typeof value === "number" && !Number.isInteger(value) ? value.toPrecision(3) : value ?? "–"

function download(name, type, text) {
  const link = node("a", { download: name, href: URL.createObjectURL(new Blob([text], { type })) })
  link.click()
  URL.revokeObjectURL(link.href)
}

function csv(rows) {
  const names = [...new Set(rows.flatMap(Object.keys))]
  const cell = (value) => /[",\n]/.test(value ?? "") ? `"${String(value).replaceAll('"', '""')}"` : value ?? ""
  return [names, ...rows.map((row) => names.map((name) => row[name]))].map((row) => row.map(cell).join(",")).join("\n")
}

// A table that sorts by the column whose heading is clicked; `click` is called with the row.
function table(names, rows, { click, sorts = {}, cell = (row, name) => short(row[name]) } = {}) {
  const body = node("tbody")
  const fill = () => {
    const { name, down } = sorts
    const ordered = name === undefined ? rows : [...rows].sort((a, b) => {
      const [x, y] = down ? [b[name], a[name]] : [a[name], b[name]]
      return (x == null) - (y == null) || (typeof x === "number" ? x - y : String(x).localeCompare(String(y)))
    })
    body.replaceChildren(...ordered.map((row) => {
      const line = node("tr", {}, ...names.map((name) => node("td", {}, cell(row, name))))
      if (click) {
        Object.assign(line, { tabIndex: 0, className: "clicks", onclick: () => click(row, line) })
        line.onkeydown = (event) => event.target === line && event.key === "Enter" && click(row, line)
      }
      return line
    }))
  }
  const heading = (name) => node("th", {}, node("button", { textContent: name, onclick: () => {
    Object.assign(sorts, { name, down: sorts.name === name && !sorts.down })
    fill()
  } }))
  fill()
  return node("div", { className: "scrolls" }, node("table", {}, node("thead", {}, node("tr", {}, ...names.map(heading))), body))
}

// Panels that are drawn once and then get new rows, so that a zoom outlives an update.
function panels(root, open) {
  const drawn = new Map()
  return async (charts, config) => {
    for (const [title, panel] of drawn) if (!charts.some((chart) => chart.title === title)) { panel.figure.remove(); drawn.delete(title) }
    for (const [order, { title, rows, spec }] of charts.entries()) {
      const panel = drawn.get(title) ?? { figure: node("figure") }
      panel.figure.style.order = order
      const shape = JSON.stringify(spec), data = JSON.stringify(rows)
      if (panel.shape === shape) {
        if (panel.data !== data) { panel.view.data("rows", rows).run(); Object.assign(panel, { data, rows }) }
        continue
      }
      const place = node("div", { className: "chart" })
      Object.assign(panel, { shape, data, rows })
      panel.figure.replaceChildren(node("figcaption", {}, title), place)
      root.append(panel.figure)
      drawn.set(title, panel)
      const full = { ...spec, width: "container", autosize: { type: "fit-x", contains: "padding" }, data: { name: "rows", values: rows } }
      const actions = { export: { svg: true, png: true }, source: false, compiled: false, editor: false }
      const { view } = await window.vegaEmbed(place, full, { actions, ast: true, mode: "vega-lite", config, renderer: "svg", logLevel: 1, downloadFileName: title, tooltip: { theme: "custom" } })
      panel.view = view
      place.querySelector(".vega-actions")?.append(node("a", { textContent: "Save as CSV", href: "#", onclick: (event) => { event.preventDefault(); download(`${title}.csv`, "text/csv", csv(panel.rows)) } }))
      view.addEventListener("click", (event, item) => { const step = item?.datum?.step ?? item?.datum?.datum?.step; if (step) open(step) })
    }
  }
}

// Rollouts: where from, a search, a table, and the one that is read.
function reader(root, ask) {
  const source = node("select", { ariaLabel: "rollouts of" }), where = node("input", { type: "search", placeholder: "search: advantage < -.5 and not solved", ariaLabel: "search rollouts" })
  const hints = node("datalist", { id: `hints${Math.random().toString(36).slice(2)}` }), list = node("div", { className: "list" }), count = node("span", { className: "quiet" }), text = node("div", { className: "reader" })
  let asked = {}
  const sorts = {}, only = node("button", { textContent: "Newest", type: "button" })
  where.setAttribute("list", hints.id)
  const read = async (row, line) => {
    line?.parentNode.querySelector(".read-now")?.classList.remove("read-now")
    line?.classList.add("read-now")
    const answer = await ask("rollout", { number: row.rollout, ...asked })
    answer.error ? text.replaceChildren(node("p", { className: "note" }, answer.error)) : text.innerHTML = answer.html
  }
  const look = async () => {
    asked = { source: source.value, where: where.value }
    const answer = await ask("rollouts", asked)
    text.replaceChildren()
    count.textContent = ""
    if (answer.error) return list.replaceChildren(node("p", { className: "note" }, answer.error))
    hints.replaceChildren(...[...EXAMPLES, ...answer.flags].map((value) => node("option", { value })))
    count.textContent = `${answer.cut ? "the first " : ""}${answer.rows.length} rollouts`
    const names = ["group", "task", "solved", "reward", "advantage", "calls", "tokens", "ended"].filter((name) => answer.rows.some((row) => row[name] != null))
    list.replaceChildren(table(source.value === "all steps" ? ["from", ...names] : names, answer.rows, { click: read, sorts }))
  }
  const form = node("form", { onsubmit: (event) => { event.preventDefault(); look() } }, source, where, hints, node("button", { textContent: "Search" }), only, count)
  source.onchange = look
  only.onclick = () => { source.selectedIndex = 0; look() }
  const section = node("section", { hidden: true }, node("h2", {}, "Rollouts"), form, list, text)
  root.append(section)
  return {
    sources(names) {
      const now = source.value
      if (names.join() === [...source.options].map((option) => option.value).join()) return
      source.replaceChildren(...names.map((name) => node("option", { value: name, textContent: name })))
      if (names.includes(now)) source.value = now
      section.hidden = !names.length
      if (names.length && !list.hasChildNodes()) look()
    },
    open(step) {  // or the nearest that is stored
      const away = (name) => Math.abs(Number(name.slice(5)) - step)
      const names = [...source.options].map((option) => option.value).filter((name) => name.startsWith("step "))
      if (!names.length) return
      source.value = names.reduce((best, name) => away(name) < away(best) ? name : best)
      look().then(() => section.scrollIntoView({ behavior: "smooth" }))
    },
  }
}

// The runs beside this one: a filter, a table, and which ones are laid over.
function others(root, ask, over, name) {
  const where = node("input", { type: "search", placeholder: "filter: rl.lr = 3e-5 and final > .6", ariaLabel: "filter runs" }), list = node("div", { className: "list" }), sorts = {}, chosen = new Set()
  const look = async () => {
    const answer = await ask("runs", { where: where.value })
    if (answer.error) return list.replaceChildren(node("p", { className: "note" }, answer.error))
    const hidden = /^(path|name)$|_(low|high)$/
    const names = [...new Set(answer.rows.flatMap(Object.keys))].filter((key) => !hidden.test(key) && answer.rows.some((row) => row[key] != null))
    const cell = (row, key) => {
      if (key === "over") return row.run === name() ? "" : node("input", { type: "checkbox", checked: chosen.has(row.path), ariaLabel: `lay ${row.run} over`, onchange: (event) => { event.target.checked ? chosen.add(row.path) : chosen.delete(row.path); over([...chosen].join("\n")) } })
      const [low, high] = [row[`${key}_low`], row[`${key}_high`]]
      return low == null ? short(row[key]) : `${short(row[key])} (${short(low)}–${short(high)})`
    }
    list.replaceChildren(table(["over", ...names], answer.rows, { sorts, cell }))
  }
  const save = node("button", { type: "button", textContent: "CSV", onclick: async () => download("runs.csv", "text/csv", csv((await ask("runs", { where: where.value })).rows ?? [])) })
  const form = node("form", { onsubmit: (event) => { event.preventDefault(); look() } }, where, node("button", { textContent: "Filter" }), save)
  const details = node("details", { ontoggle: () => details.open && !list.hasChildNodes() && look() }, node("summary", {}, "Runs in this folder; choose which to lay over"), form, list)
  root.append(details)
}

function render({ model, el, experimental }) {
  const patience = () => ({ signal: AbortSignal.timeout(120_000) })  // a kernel may be busy with a cell
  const ask = (name, values = {}) =>
    experimental.invoke("ask", { name, values }, patience()).then(([answer]) => answer, (error) => ({ error: String(error) }))
  const dot = node("span", { textContent: "● " }), headline = node("span"), bar = node("div"), stop = node("button", { textContent: "Stop watching", title: "The run goes on", onclick: () => ask("close") })
  const trouble = node("pre", { className: "note", hidden: true }), grid = node("div", { className: "grid" }), tables = node("div", { className: "tables" })
  const root = node("div", { className: "cnb desk" }, node("div", { className: "head", role: "status" }, dot, headline), node("div", { className: "progress" }, bar), trouble, grid, tables)
  el.append(root)
  const rollouts = reader(root, ask), draw = panels(grid, rollouts.open)
  let waits = Promise.resolve()
  const show = () => {
    const board = model.get("board")
    trouble.hidden = !board.error
    if (board.error) return trouble.textContent = board.error
    dot.className = board.state
    headline.textContent = board.headline
    Object.assign(bar, { className: board.state }).style.width = `${100 * board.progress}%`
    waits = waits.then(() => draw(board.charts, board.config)).catch((error) => { trouble.hidden = false; trouble.textContent = String(error) })
    tables.replaceChildren(...board.tables.map(([heading, names, ...rows]) =>
      node("section", {}, node("h2", {}, heading), table(names, rows.map((row) => Object.fromEntries(names.map((name, at) => [name, row[at]])))))))
    rollouts.sources(board.sources)
    stop.hidden = !model.get("follows")
  }
  others(root, ask, async (over) => { model.set("board", await ask("board", { over })); show() }, () => model.get("board").run)
  root.append(stop)
  model.on("change:board", show)
  model.on("change:follows", () => { stop.hidden = !model.get("follows") })
  if (model.get("board")?.charts || model.get("board")?.error) show()
}
export default { render }
