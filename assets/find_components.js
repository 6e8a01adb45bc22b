// `AppTree` is Gradio's tree of components (app/web/gradio_workarounds.py), which is complete before
// its methods are called, and stays as it is. Two methods begin by searching `root` for a component
// that is given by its id. They find it at once, because `root` is then this component. A third one
// searches all events for those that a component triggers.
const tree = AppTree.prototype;
const { get, set } = Object.getOwnPropertyDescriptor(tree, "root");
const nothing = { id: null };
const indexes = new WeakMap();
let wanted = null;

function add(index, node) {
  index.set(node.id, node);
  for (const child of node.children || []) add(index, child);
  return index;
}

function find(root, id) {
  if (!indexes.has(root)) indexes.set(root, add(new Map(), root));
  return indexes.get(root).get(id) || nothing;
}

Object.defineProperty(tree, "root", {
  configurable: true,
  set,
  get() {
    const id = wanted;
    wanted = null;
    return id === null ? get.call(this) : find(get.call(this), id);
  },
});
for (const name of ["get_state", "update_state"]) {
  const method = tree[name];
  tree[name] = function ofComponent(id, ...more) {
    wanted = id;
    try {
      return method.call(this, id, ...more);
    } finally {
      wanted = null;
    }
  };
}

const triggers = new WeakMap();

function triggered(events) {
  if (!triggers.has(events)) {
    const found = new Map();
    for (const { targets } of events) {
      // Of several triggers in one component only the first counts.
      for (const [id, trigger] of new Map([...targets].reverse())) {
        if (trigger) found.set(id, [...(found.get(id) || []), trigger]);
      }
    }
    triggers.set(events, found);
  }
  return triggers.get(events);
}

tree.find_attached_events = (node, events) => {
  node.props.shared_props.attached_events = [...(triggered(events).get(node.id) || [])];
  return node;
};
