// The kernels of the instruction set in use.
#pragma once

#include "driver.hpp"

namespace ff {

const KernelTable& active_kernels();

}  // namespace ff
