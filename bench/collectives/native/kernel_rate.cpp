// Rate of the summing kernels on one core, data in the second-level cache: one line of JSON for each type and number of
// inputs. The rate counts the bytes read, and processor time, in which others do not run.
#include <cstdio>
#include <vector>

#include "fireflyer/collectives/kernels/kernels.hpp"
#include "orders.h"

namespace {

constexpr std::size_t input_bytes = 32 << 10;
constexpr double sample_s = 0.02;
constexpr int samples = 9;

double one_sample(char* out, const std::vector<const void*>& inputs, std::size_t count, ff::DType dtype) {
  const double begun = thread_cpu_s();
  double taken = 0;
  long calls = 0;
  do {
    for (int i = 0; i < 16; ++i) ff::reduce_to(out, inputs.data(), static_cast<int>(inputs.size()), count, dtype);
    calls += 16;
    taken = thread_cpu_s() - begun;
  } while (taken < sample_s);
  return static_cast<double>(calls) * static_cast<double>(input_bytes * inputs.size()) / taken;
}

void report(const char* name, int n) {
  const ff::DType dtype = ff::dtype_from_name(name);
  std::vector<char> out(input_bytes), memory(input_bytes * static_cast<std::size_t>(n), 0x31);  // small numbers in every type
  std::vector<const void*> inputs;
  for (int i = 0; i < n; ++i) inputs.push_back(memory.data() + static_cast<std::size_t>(i) * input_bytes);
  std::printf("{\"dtype\": \"%s\", \"inputs\": %d, \"isa\": \"%s\", \"bytes_per_s\": [", name, n, ff::active_isa());
  one_sample(out.data(), inputs, input_bytes / ff::dtype_size(dtype), dtype);
  for (int i = 0; i < samples; ++i)
    std::printf("%s%.0f", i == 0 ? "" : ", ", one_sample(out.data(), inputs, input_bytes / ff::dtype_size(dtype), dtype));
  std::printf("]}\n");
  std::fflush(stdout);
}

}  // namespace

int main() {
  for (const char* name : {"f64", "f32", "f16", "bf16", "f8e4m3", "f8e5m2", "i32", "i64"})
    for (const int n : {2, 4, 8}) report(name, n);
}
