// Checks arguments and calls the reductions of the instruction set in use.
#include "fireflyer/collectives/kernels/kernels.hpp"

#include <algorithm>
#include <atomic>
#include <cstdint>
#include <cstring>
#include <stdexcept>
#include <string>
#include <vector>

#include "active.hpp"
#include "fireflyer/base/cpu.hpp"

namespace ff {
namespace {

struct TypeInfo {
  const char* name;
  std::size_t size;
  DType accum;
};

constexpr TypeInfo types[dtype_count] = {
    {"f64", 8, DType::f64},
    {"f32", 4, DType::f32},
    {"f16", 2, DType::f32},
    {"bf16", 2, DType::f32},
    {"f8e4m3", 1, DType::f32},
    {"f8e5m2", 1, DType::f32},
    {"i32", 4, DType::i32},
    {"i64", 8, DType::i64},
    {"i8", 1, DType::i8},
    {"u8", 1, DType::u8},
};

static_assert(types[dtype_count - 1].name != nullptr, "a DType has no line in types");

const TypeInfo& info(DType d) {
  const auto index = static_cast<std::size_t>(d);
  if (index >= dtype_count) throw std::invalid_argument("dtype code " + std::to_string(index) + " is not known");
  return types[index];
}

// The widest first. A name stands here only if this CPU, and the operating system, can run its code.
std::vector<const KernelTable*> runnable() {
  std::vector<const KernelTable*> tables;
#if defined(__x86_64__)
  const CpuFeatures cpu = cpu_features();
  const bool avx512 = cpu.avx512f && cpu.avx512bw && cpu.avx512vl && cpu.avx512dq && cpu.f16c && cpu.fma;
  if (avx512 && cpu.avx512vbmi) tables.push_back(&avx512vbmi_kernels());
  if (avx512) tables.push_back(&avx512_kernels());
  if (cpu.avx2 && cpu.f16c && cpu.fma) tables.push_back(&avx2_kernels());
#endif
  tables.push_back(&portable_kernels());
  return tables;
}

const KernelTable* find(const char* name) {
  for (const KernelTable* table : runnable())
    if (std::strcmp(name, table->name) == 0) return table;
  return nullptr;
}

std::atomic<const KernelTable*>& active() {
  static std::atomic<const KernelTable*> table{runnable().front()};
  return table;
}

void check(int n, DType d, ReduceOp op, std::uint32_t divisor) {
  if (n < 1) throw std::invalid_argument("a reduction needs at least one input, not " + std::to_string(n));
  check_reduces(op, d);
  if (divisor == 0) throw std::invalid_argument("a sum cannot be divided by 0");
}

constexpr std::size_t line = 64;

std::size_t misplaced(const void* p) { return reinterpret_cast<std::uintptr_t>(p) % line; }

// Outputs that are no inputs, and lie like the first of them, are streamed, after as many elements as it takes to reach
// a line of the cache. An output that is an input has its lines in the cache already.
std::uint64_t reduce_streaming(const Reduction& all, std::size_t size, ReduceFn reduce) {
  std::vector<void*> outs, streamed;
  for (int k = 0; k < all.n_outs; ++k) {
    void* out = all.outs[k];
    const bool apart = std::find(all.in, all.in + all.n, out) == all.in + all.n && misplaced(out) % size == 0;
    (apart && (streamed.empty() || misplaced(out) == misplaced(streamed[0])) ? streamed : outs).push_back(out);
  }
  if (streamed.empty()) return reduce(all);
  const std::size_t head = std::min((line - misplaced(streamed[0])) % line / size, all.count);
  std::vector<const void*> in(all.in, all.in + all.n);
  const auto n_streamed = static_cast<int>(streamed.size());
  outs.insert(outs.end(), streamed.begin(), streamed.end());
  const std::uint64_t saturated = reduce({outs.data(), all.n_outs, 0, in.data(), all.n, head, all.divisor});
  for (void*& out : outs) out = static_cast<std::uint8_t*>(out) + head * size;
  for (const void*& input : in) input = static_cast<const std::uint8_t*>(input) + head * size;
  return saturated + reduce({outs.data(), all.n_outs, n_streamed, in.data(), all.n, all.count - head, all.divisor});
}

}  // namespace

const KernelTable& active_kernels() { return *active().load(std::memory_order_relaxed); }

std::size_t dtype_size(DType d) { return info(d).size; }
const char* dtype_name(DType d) { return info(d).name; }
DType accum_dtype(DType d) { return info(d).accum; }
bool integral(DType d) { return accum_dtype(d) != DType::f32 && accum_dtype(d) != DType::f64; }

DType dtype_from_name(std::string_view name) {
  for (int i = 0; i < dtype_count; ++i)
    if (name == types[i].name) return static_cast<DType>(i);
  std::string known;
  for (const TypeInfo& type : types) known += std::string(" ") + type.name;
  throw std::invalid_argument("dtype '" + std::string(name) + "' is not one of" + known);
}

constexpr const char* op_names[reduce_op_count] = {"sum", "min", "max", "product", "mean", "band", "bor", "bxor"};
static_assert(op_names[reduce_op_count - 1] != nullptr, "a ReduceOp has no name");

const char* reduce_op_name(ReduceOp op) {
  const auto index = static_cast<std::size_t>(op);
  if (index >= reduce_op_count) throw std::invalid_argument("reduce op code " + std::to_string(index) + " is not known");
  return op_names[index];
}

ReduceOp reduce_op_from_name(std::string_view name) {
  for (int i = 0; i < reduce_op_count; ++i)
    if (name == op_names[i]) return static_cast<ReduceOp>(i);
  std::string known;
  for (const char* one : op_names) known += std::string(" ") + one;
  throw std::invalid_argument("op '" + std::string(name) + "' is not one of" + known);
}

void check_reduces(ReduceOp op, DType d) {
  const char *name = reduce_op_name(op), *type = info(d).name;
  if (bitwise(op) && !integral(d)) throw std::invalid_argument(std::string(name) + " combines the bits of integers, not of " + type);
}

std::uint64_t reduce_to_accum(void* acc, const void* const* in, int n, std::size_t count, DType d, ReduceOp op) {
  check(n, d, op, 1);
  return active_kernels().widen[row_of(op)][static_cast<int>(d)]({&acc, 1, 0, in, n, count, 1});
}

std::uint64_t reduce_to(void* out, const void* const* in, int n, std::size_t count, DType d, ReduceOp op, std::uint32_t divisor) {
  return reduce_to_many(&out, 1, in, n, count, d, op, divisor);
}

std::uint64_t reduce_to_many(void* const* outs, int n_outs, const void* const* in, int n, std::size_t count, DType d, ReduceOp op,
                             std::uint32_t divisor, bool stream) {
  check(n, d, op, divisor);
  if (n_outs < 1) throw std::invalid_argument("a reduction needs at least one output, not " + std::to_string(n_outs));
  const Reduction all{outs, n_outs, 0, in, n, count, divisor};
  const ReduceFn reduce = active_kernels().reduce[row_of(op)][static_cast<int>(d)];
  return stream ? reduce_streaming(all, dtype_size(d), reduce) : reduce(all);
}

std::uint64_t add_accum(void* out, const void* const* parts, int n, std::size_t count, DType accum, ReduceOp op) {
  check(n, accum, op, 1);
  if (accum_dtype(accum) != accum)
    throw std::invalid_argument(std::string(dtype_name(accum)) + " is not a type that sums are kept in");
  return active_kernels().reduce[row_of(op)][static_cast<int>(accum)]({&out, 1, 0, parts, n, count, 1});
}

std::uint64_t round_from_accum(void* out, const void* acc, std::size_t count, DType d, std::uint32_t divisor) {
  check(1, d, ReduceOp::sum, divisor);
  return active_kernels().narrow[static_cast<int>(d)]({&out, 1, 0, &acc, 1, count, divisor});
}

void quantize_fp8_blocks(std::uint8_t* out, float* scales, const float* in, std::size_t count, std::size_t block) {
  if (block == 0) throw std::invalid_argument("a block needs at least one element");
  active_kernels().quantize(out, scales, in, count, block);
}

void dequantize_fp8_blocks(float* out, const std::uint8_t* in, const float* scales, std::size_t count, std::size_t block) {
  if (block == 0) throw std::invalid_argument("a block needs at least one element");
  active_kernels().dequantize(out, in, scales, count, block);
}

const char* active_isa() { return active_kernels().name; }

bool isa_supported(const char* name) { return find(name) != nullptr; }

void set_isa(const char* name) {
  const KernelTable* table = find(name);
  if (table == nullptr)
    throw std::invalid_argument("this CPU cannot run the instruction set '" + std::string(name) + "'");
  active().store(table, std::memory_order_relaxed);
}

}  // namespace ff
