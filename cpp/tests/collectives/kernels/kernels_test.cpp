// Every instruction set gives the bits of the portable one, and those are right where they can be said by hand.
#include "fireflyer/collectives/kernels/kernels.hpp"

#include <algorithm>
#include <bit>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <stdexcept>
#include <string>
#include <type_traits>
#include <vector>

#include "check.hpp"

namespace {

using Bytes = std::vector<std::uint8_t>;
using ff::DType;

const std::vector<std::string> vector_isas = {"avx2", "avx512", "avx512vbmi"};
const ff::ReduceOp ops[] = {ff::ReduceOp::sum, ff::ReduceOp::min, ff::ReduceOp::max, ff::ReduceOp::product, ff::ReduceOp::mean,
                            ff::ReduceOp::band, ff::ReduceOp::bor, ff::ReduceOp::bxor};

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

bool integer(DType d) { return ff::dtype_name(d)[0] == 'i' || ff::dtype_name(d)[0] == 'u'; }

struct Results {
  Bytes rounded, wide, narrowed, second;
  std::uint64_t saturated = 0, saturated_later = 0;
  bool operator==(const Results&) const = default;
};

Results results(const std::vector<const void*>& in, std::size_t count, DType d, ff::ReduceOp op) {
  const std::size_t size = ff::dtype_size(d), wide_size = ff::dtype_size(ff::accum_dtype(d));
  const int n = static_cast<int>(in.size());
  const auto divisor = op == ff::ReduceOp::mean ? static_cast<std::uint32_t>(n) : 1u;
  Results r{Bytes(count * size), Bytes(count * wide_size), Bytes(count * size), Bytes(count * size + 1)};
  void* outs[] = {r.rounded.data(), r.second.data() + 1};
  r.saturated = ff::reduce_to_many(outs, 2, in.data(), n, count, d, op, divisor);
  CHECK(ff::reduce_to_accum(r.wide.data(), in.data(), n, count, d, op) == 0);
  r.saturated_later = ff::round_from_accum(r.narrowed.data(), r.wide.data(), count, d, divisor);
  return r;
}

void instruction_sets_agree() {
  Random random{42};
  for (int code = 0; code < ff::dtype_count; ++code)
    for (const auto op : ops)
      for (const int n : {1, 2, 3, 8, 17})
        for (const std::size_t count : {0u, 1u, 31u, 64u, 65u, 257u, 1000u, 4099u}) {
          const auto d = static_cast<DType>(code);
          if (ff::bitwise(op) && !integer(d)) continue;
          const auto inputs = random_inputs(n, count * ff::dtype_size(d) + 3, random);
          const auto in = pointers(inputs, count % 4);
          ff::set_isa("portable");
          const Results expected = results(in, count, d, op);
          CHECK(expected.rounded == expected.narrowed);
          CHECK(Bytes(expected.second.begin() + 1, expected.second.end()) == expected.rounded);
          CHECK(expected.saturated == expected.saturated_later);
          for (const auto& isa : vector_isas)
            if (ff::isa_supported(isa.c_str())) {
              ff::set_isa(isa.c_str());
              CHECK(results(in, count, d, op) == expected);
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
      const std::uint64_t saturated = ff::round_from_accum(expected.data(), bits.data(), chunk, d);
      for (const auto& isa : vector_isas)
        if (ff::isa_supported(isa.c_str())) {
          ff::set_isa(isa.c_str());
          CHECK(ff::round_from_accum(got.data(), bits.data(), chunk, d) == saturated);
          CHECK(got == expected);
        }
    }
}

// Outputs at every kind of place within a cache line, one of them an input: the same bits, and not a byte beside them.
void streams_alike() {
  Random random{11};
  for (int code = 0; code < ff::dtype_count; ++code)
    for (const std::size_t count : {0u, 3u, 64u, 1000u})
      for (const std::size_t offset : {0u, 8u, 24u, 56u, 61u}) {
        const auto d = static_cast<DType>(code);
        const std::size_t bytes = count * ff::dtype_size(d);
        auto inputs = random_inputs(3, bytes + 1, random);
        const auto in = pointers(inputs, 1);
        Bytes expected(bytes), first(bytes + 256, 0xa5), second(bytes + 256, 0xa5);
        const auto saturated = ff::reduce_to(expected.data(), in.data(), 3, count, d);
        const auto placed = [&](Bytes& b) { return b.data() + 64 - reinterpret_cast<std::uintptr_t>(b.data()) % 64 + offset; };
        void* outs[] = {placed(first), inputs[1].data() + 1, placed(second)};
        CHECK(ff::reduce_to_many(outs, 3, in.data(), 3, count, d, ff::ReduceOp::sum, 1, true) == saturated);
        for (void* out : outs) CHECK(std::equal(expected.begin(), expected.end(), static_cast<std::uint8_t*>(out)));
        for (Bytes* b : {&first, &second}) CHECK(placed(*b)[-1] == 0xa5 && placed(*b)[bytes] == 0xa5);
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

void every_isa(void (*test)()) {
  ff::set_isa("portable");
  test();
  for (const auto& isa : vector_isas)
    if (ff::isa_supported(isa.c_str())) {
      ff::set_isa(isa.c_str());
      test();
    }
}

template <class T>
T reduced(T a, T b, DType d, ff::ReduceOp op) {
  const void* in[] = {&a, &b};
  T out;
  ff::reduce_to(&out, in, 2, 1, d, op);
  return out;
}

void smallest_and_largest() {
  using enum ff::ReduceOp;
  const float nan = std::bit_cast<float>(0xffc12345u);
  for (const auto op : {ff::ReduceOp::min, ff::ReduceOp::max}) {
    CHECK(std::bit_cast<std::uint32_t>(reduced(1.0f, nan, DType::f32, op)) == 0x7fc00000u);
    CHECK(std::bit_cast<std::uint32_t>(reduced(nan, 1.0f, DType::f32, op)) == 0x7fc00000u);
    const std::uint32_t zero = op == ff::ReduceOp::min ? 0x80000000u : 0u;
    CHECK(std::bit_cast<std::uint32_t>(reduced(0.0f, -0.0f, DType::f32, op)) == zero);
    CHECK(std::bit_cast<std::uint32_t>(reduced(-0.0f, 0.0f, DType::f32, op)) == zero);
    CHECK(std::bit_cast<std::uint64_t>(reduced(0.0, -0.0, DType::f64, op)) == std::uint64_t{zero} << 32);
    CHECK(std::bit_cast<std::uint64_t>(reduced(-0.0, 0.0, DType::f64, op)) == std::uint64_t{zero} << 32);
  }
  CHECK(reduced<std::int64_t>(INT64_MIN, 1, DType::i64, min) == INT64_MIN);
  CHECK(reduced<std::int8_t>(-128, 1, DType::i8, max) == 1);
  CHECK(reduced<std::uint8_t>(128, 1, DType::u8, max) == 128);
  CHECK(reduced<std::int8_t>(-7, 37, DType::i8, product) == static_cast<std::int8_t>(-259));
  CHECK(reduced<std::int64_t>(-3'000'000'000, 3'000'000'000, DType::i64, product) == -9'000'000'000'000'000'000);
}

// What saturates is counted after the division, in whole registers and in the tail alike.
void saturation_is_counted() {
  for (const std::size_t count : {1u, 64u, 200u}) {
    const Bytes a(count, 0x7e);  // 448
    Bytes out(count);
    const void* in[] = {a.data(), a.data()};
    CHECK(ff::reduce_to(out.data(), in, 2, count, DType::f8e4m3) == count);
    CHECK(out == Bytes(count, 0x7e));
    CHECK(ff::reduce_to(out.data(), in, 2, count, DType::f8e4m3, ff::ReduceOp::mean, 2) == 0);
    CHECK(out == Bytes(count, 0x7e));
    CHECK(ff::reduce_to(out.data(), in, 2, count, DType::f8e4m3, ff::ReduceOp::max) == 0);
  }
  const std::uint32_t e4m3[] = {0x43e80000u, 0x43e80001u, 0xff800000u, 0x7fc00000u};  // 464, above, -inf, NaN
  const std::uint32_t e5m2[] = {0x476fffffu, 0x47700000u, 0xff800000u, 0x7fc00000u};  // below 61440, 61440, -inf, NaN
  Bytes out(4);
  CHECK(ff::round_from_accum(out.data(), e4m3, 4, DType::f8e4m3) == 2);
  CHECK((out == Bytes{0x7e, 0x7e, 0xfe, 0x7f}));
  CHECK(ff::round_from_accum(out.data(), e5m2, 4, DType::f8e5m2) == 1);
  CHECK((out == Bytes{0x7b, 0x7c, 0xfc, 0x7f}));
}

void divides_once() {
  const float parts[] = {1.0f, 0.0f, 0.0f};
  const void* in[] = {&parts[0], &parts[1], &parts[2]};
  float out = 0;
  ff::reduce_to(&out, in, 3, 1, DType::f32, ff::ReduceOp::mean, 3);
  CHECK(out == 1.0f / 3.0f);
  ff::reduce_to(&out, in, 3, 1, DType::f32, ff::ReduceOp::mean, 4);
  CHECK(out == 0.25f);
}

std::vector<std::uint32_t> bits_of(const std::vector<float>& values) {
  std::vector<std::uint32_t> bits(values.size());
  if (!values.empty()) std::memcpy(bits.data(), values.data(), values.size() * 4);
  return bits;
}

void blocks_keep_their_scale() {
  Random random{7};
  for (const std::size_t count : {0u, 1u, 127u, 128u, 129u, 1000u})
    for (const std::size_t block : {1u, 33u, 128u}) {
      std::vector<float> in(count), scales((count + block - 1) / block);
      for (auto& x : in) x = std::bit_cast<float>(static_cast<std::uint32_t>(random.next() >> 20));
      if (count == 1000) std::fill(in.begin(), in.begin() + 300, 0.0f);
      ff::set_isa("portable");
      Bytes out(count), got(count);
      std::vector<float> back(count), got_back(count), got_scales(scales.size());
      ff::quantize_fp8_blocks(out.data(), scales.data(), in.data(), count, block);
      ff::dequantize_fp8_blocks(back.data(), out.data(), scales.data(), count, block);
      for (std::size_t i = 0; i < count; ++i) {
        const float amax = scales[i / block] * 448;
        if (std::isfinite(amax)) CHECK(std::abs(back[i] - in[i]) <= std::max(std::abs(in[i]) / 16, amax / 448 / 1024) * 1.0001f);
      }
      for (const auto& isa : vector_isas)
        if (ff::isa_supported(isa.c_str())) {
          ff::set_isa(isa.c_str());
          ff::quantize_fp8_blocks(got.data(), got_scales.data(), in.data(), count, block);
          ff::dequantize_fp8_blocks(got_back.data(), got.data(), got_scales.data(), count, block);
          CHECK(got == out && bits_of(got_scales) == bits_of(scales) && bits_of(got_back) == bits_of(back));
        }
    }
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

void integers_are_divided_towards_zero() {
  const auto mean = [](auto a, auto b, auto c, std::uint32_t divisor) {
    using T = decltype(a);
    const DType d = sizeof(T) == 8 ? DType::i64 : sizeof(T) == 4    ? DType::i32
                                              : std::is_signed_v<T> ? DType::i8
                                                                    : DType::u8;
    const void* in[] = {&a, &b, &c};
    T out = 0;
    ff::reduce_to(&out, in, 3, 1, d, ff::ReduceOp::mean, divisor);
    return out;
  };
  CHECK(mean(-1, -2, -4, 3) == -2);  // -7 / 3
  CHECK(mean(1, 2, 4, 2) == 3);      // 7 / 2
  CHECK(mean(-1, -2, -4, 2) == -3);  // not -4, as a shift would make of it
  CHECK(mean(std::int64_t{1} << 60, std::int64_t{1}, std::int64_t{0}, 3) == ((std::int64_t{1} << 60) + 1) / 3);  // no float holds it
  CHECK(mean(std::int8_t{100}, std::int8_t{100}, std::int8_t{0}, 2) == -28);  // 200 wraps to -56
  CHECK(mean(std::uint8_t{200}, std::uint8_t{55}, std::uint8_t{0}, 1000) == 0);  // a divisor that the type cannot hold
}

void refuses() {
  float x = 0;
  const void* in[] = {&x};
  CHECK(refused([&] { ff::reduce_to(&x, in, 0, 1, DType::f32); }));
  CHECK(refused([&] { ff::reduce_to(&x, in, 1, 1, static_cast<DType>(ff::dtype_count)); }));
  CHECK(refused([&] { ff::add_accum(&x, in, 1, 1, DType::bf16); }));
  CHECK(refused([&] { ff::reduce_to(&x, in, 1, 1, DType::f32, static_cast<ff::ReduceOp>(ff::reduce_op_count)); }));
  CHECK(refused([&] { ff::reduce_to(&x, in, 1, 1, DType::f32, ff::ReduceOp::mean, 0); }));
  for (int code = 0; code < ff::dtype_count; ++code) {
    const auto d = static_cast<DType>(code);
    CHECK(!refused([&] { ff::round_from_accum(nullptr, nullptr, 0, d, 2); }));
    for (const auto op : {ff::ReduceOp::band, ff::ReduceOp::bor, ff::ReduceOp::bxor}) {
      CHECK(refused([&] { ff::reduce_to(nullptr, in, 1, 0, d, op); }) == !integer(d));
      CHECK(refused([&] { ff::reduce_to_accum(nullptr, in, 1, 0, d, op); }) == !integer(d));
    }
    CHECK(ff::integral(d) == integer(d));
    CHECK(ff::dtype_from_name(ff::dtype_name(d)) == d);
  }
  CHECK(refused([&] { ff::reduce_to_many(nullptr, 0, in, 1, 1, DType::f32); }));
  CHECK(refused([] { ff::set_isa("mmx"); }));
  CHECK(refused([] { ff::dtype_from_name("f128"); }));
}

}  // namespace

int main() {
  instruction_sets_agree();
  floats_round_alike();
  for (const auto test : {in_place_and_wrapping, streams_alike, sums_from_left_to_right, smallest_and_largest, saturation_is_counted, divides_once, integers_are_divided_towards_zero})
    every_isa(test);
  blocks_keep_their_scale();
  refuses();
}
