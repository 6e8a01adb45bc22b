#include "module.hpp"

void bind_sampling(nanobind::module_ &) {}
