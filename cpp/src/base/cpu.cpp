#include "fireflyer/base/cpu.hpp"

namespace ff {

CpuFeatures cpu_features() {
  CpuFeatures f;
#if defined(__x86_64__)
  __builtin_cpu_init();
  f.sse42 = __builtin_cpu_supports("sse4.2");
  f.pclmul = __builtin_cpu_supports("pclmul");
  f.avx2 = __builtin_cpu_supports("avx2");
  f.f16c = __builtin_cpu_supports("f16c");
  f.fma = __builtin_cpu_supports("fma");
  f.avx512f = __builtin_cpu_supports("avx512f");
  f.avx512bw = __builtin_cpu_supports("avx512bw");
  f.avx512vl = __builtin_cpu_supports("avx512vl");
  f.avx512dq = __builtin_cpu_supports("avx512dq");
  f.avx512vbmi = __builtin_cpu_supports("avx512vbmi");
  f.vpclmul = __builtin_cpu_supports("vpclmulqdq");
#endif
  return f;
}

std::vector<std::string> cpu_feature_names() {
  const CpuFeatures f = cpu_features();
  const struct {
    bool present;
    const char* name;
  } all[] = {
      {f.sse42, "sse4_2"},
      {f.pclmul, "pclmulqdq"},
      {f.avx2, "avx2"},
      {f.f16c, "f16c"},
      {f.fma, "fma"},
      {f.avx512f, "avx512f"},
      {f.avx512bw, "avx512bw"},
      {f.avx512vl, "avx512vl"},
      {f.avx512dq, "avx512dq"},
      {f.avx512vbmi, "avx512vbmi"},
      {f.vpclmul, "vpclmulqdq"},
  };
  std::vector<std::string> names;
  for (const auto& feature : all)
    if (feature.present) names.emplace_back(feature.name);
  return names;
}

}  // namespace ff
