#include "module.hpp"

void bind_drafting(nanobind::module_ &) {}
