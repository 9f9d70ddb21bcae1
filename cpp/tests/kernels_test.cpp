// Every instruction set gives the bits of the portable one, and those are right where they can be said by hand.
#include "fireflyer/kernels.hpp"

#include <bit>
#include <cstdint>
#include <cstring>
#include <stdexcept>
#include <string>
#include <vector>

#include "check.hpp"

namespace {

using Bytes = std::vector<std::uint8_t>;
using ff::DType;

const std::vector<std::string> vector_isas = {"avx2", "avx512"};

struct Random {
  std::uint64_t state;
  std::uint64_t next() {
    state ^= state << 13;
    state ^= state >> 7;
    return state ^= state << 17;
  }
};

// Random bits: among them NaNs, infinities and subnormals of every type.
std::vector<Bytes> random_inputs(int n, std::size_t bytes, Random& random) {
  std::vector<Bytes> inputs(static_cast<std::size_t>(n), Bytes(bytes));
  for (auto& input : inputs)
    for (auto& byte : input) byte = static_cast<std::uint8_t>(random.next() >> 33);
  return inputs;
}

std::vector<const void*> pointers(const std::vector<Bytes>& inputs, std::size_t offset) {
  std::vector<const void*> p;
  for (const auto& input : inputs) p.push_back(input.data() + offset);
  return p;
}

struct Sums {
  Bytes rounded, wide, narrowed;
  bool operator==(const Sums&) const = default;
};

Sums sums(const std::vector<const void*>& in, std::size_t count, DType d) {
  const std::size_t wide_size = ff::dtype_size(ff::accum_dtype(d));
  Sums s{Bytes(count * ff::dtype_size(d)), Bytes(count * wide_size), Bytes(count * ff::dtype_size(d))};
  ff::reduce_to(s.rounded.data(), in.data(), static_cast<int>(in.size()), count, d);
  ff::reduce_to_accum(s.wide.data(), in.data(), static_cast<int>(in.size()), count, d);
  ff::round_from_accum(s.narrowed.data(), s.wide.data(), count, d);
  return s;
}

void instruction_sets_agree() {
  Random random{42};
  for (int code = 0; code < ff::dtype_count; ++code)
    for (const int n : {1, 2, 3, 8, 17})
      for (const std::size_t count : {0u, 1u, 31u, 64u, 65u, 1000u, 4099u}) {
        const auto d = static_cast<DType>(code);
        const auto inputs = random_inputs(n, count * ff::dtype_size(d) + 3, random);
        const auto in = pointers(inputs, count % 4);
        ff::set_isa("portable");
        const Sums expected = sums(in, count, d);
        CHECK(expected.rounded == expected.narrowed);
        for (const auto& isa : vector_isas)
          if (ff::isa_supported(isa.c_str())) {
            ff::set_isa(isa.c_str());
            CHECK(sums(in, count, d) == expected);
          }
      }
}

// Every 61st bit pattern of a float: all exponents, both signs.
void floats_round_alike() {
  constexpr std::size_t chunk = 1 << 16;
  std::vector<std::uint32_t> bits(chunk);
  for (const auto d : {DType::f16, DType::bf16, DType::f8e4m3, DType::f8e5m2})
    for (std::uint64_t start = 0; start < 1ull << 32; start += chunk * 61) {
      for (std::size_t i = 0; i < chunk; ++i) bits[i] = static_cast<std::uint32_t>(start + i * 61);
      Bytes expected(chunk * ff::dtype_size(d)), got(expected.size());
      ff::set_isa("portable");
      ff::round_from_accum(expected.data(), bits.data(), chunk, d);
      for (const auto& isa : vector_isas)
        if (ff::isa_supported(isa.c_str())) {
          ff::set_isa(isa.c_str());
          ff::round_from_accum(got.data(), bits.data(), chunk, d);
          CHECK(got == expected);
        }
    }
}

void in_place_and_wrapping() {
  std::vector<std::int32_t> a(100, INT32_MAX), b(100, 1);
  const void* in[] = {a.data(), b.data()};
  ff::reduce_to(a.data(), in, 2, a.size(), DType::i32);
  CHECK(a == std::vector<std::int32_t>(100, INT32_MIN));
}

void sums_from_left_to_right() {
  const float parts[] = {1e8f, 1.0f, 1.0f, -1e8f};
  const void* in[] = {&parts[0], &parts[1], &parts[2], &parts[3]};
  float out = -1;
  ff::reduce_to(&out, in, 4, 1, DType::f32);
  CHECK(out == 0.0f);
}

template <class Call>
bool refused(Call call) {
  try {
    call();
  } catch (const std::invalid_argument&) {
    return true;
  }
  return false;
}

void refuses() {
  float x = 0;
  const void* in[] = {&x};
  CHECK(refused([&] { ff::reduce_to(&x, in, 0, 1, DType::f32); }));
  CHECK(refused([&] { ff::reduce_to(&x, in, 1, 1, static_cast<DType>(8)); }));
  CHECK(refused([&] { ff::add_accum(&x, in, 1, 1, DType::bf16); }));
  CHECK(refused([] { ff::set_isa("mmx"); }));
  CHECK(refused([] { ff::dtype_from_name("f128"); }));
}

}  // namespace

int main() {
  instruction_sets_agree();
  floats_round_alike();
  in_place_and_wrapping();
  sums_from_left_to_right();
  refuses();
}
