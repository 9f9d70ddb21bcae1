// The clock that deadlines and ages are counted by.
#pragma once

#include <cstdint>

namespace ff {

std::int64_t monotonic_ns();

}  // namespace ff
