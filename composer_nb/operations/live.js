// The desk on a page: `fetch` stands in for a kernel, and the board is asked for again and again. It follows desk.js.
const state = { follows: false }, listeners = []
const fetched = async (name, values) => (await fetch(`ask/${name}?${new URLSearchParams(values)}`)).json()
const model = {
  get: (name) => state[name],
  set: (name, value) => { state[name] = value },
  on: (name, call) => listeners.push(call),
}
let over = ""
const invoke = async (_, { name, values }) => { over = values.over ?? over; return [await fetched(name, values)] }
render({ model, el: document.getElementById("desk"), experimental: { invoke } })
const keepUp = async () => {
  let pause = 2000
  try { state.board = await fetched("board", { over }) }
  catch {
    state.board = { error: "The program that served this page has ended. The run's folder holds report.html." }
    pause = 10000
  }
  listeners[0]()
  setTimeout(keepUp, pause)
}
keepUp()
