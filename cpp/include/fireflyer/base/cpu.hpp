// What this CPU can run, as far as this library cares. All false on other architectures than x86-64.
#pragma once

#include <string>
#include <vector>

namespace ff {

struct CpuFeatures {
  bool sse42 = false, pclmul = false, avx2 = false, f16c = false, fma = false;
  bool avx512f = false, avx512bw = false, avx512vl = false, avx512dq = false, avx512vbmi = false;
  bool vpclmul = false;
};

CpuFeatures cpu_features();
std::vector<std::string> cpu_feature_names();  // as the kernel spells them: sse4_2, pclmulqdq, avx2, ...

}  // namespace ff
