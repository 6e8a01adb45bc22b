"""One file per tab: `build` makes its components, `wire` connects them."""
