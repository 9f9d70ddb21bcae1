// Rows by index: sums from left to right, what is named twice, within their buffers. What the bytes are is the business of
// the twin's tests.
#include "fireflyer/collectives/kernels/rows.hpp"

#include <cstdint>
#include <cstring>
#include <stdexcept>
#include <vector>

#include "check.hpp"
#include "fireflyer/collectives/kernels/kernels.hpp"

namespace {

constexpr std::size_t width = 256;

struct Payload {
  Payload(std::size_t rows, const ff::RowFormat& format) : bytes(rows * ff::row_bytes(format, width)) {
    for (std::size_t i = 0; i < rows; ++i) table.push_back(bytes.data() + i * ff::row_bytes(format, width));
  }
  ff::RowTable rows() const { return {table.data(), table.size()}; }
  std::vector<std::uint8_t> bytes;
  std::vector<const std::uint8_t*> table;
};

std::vector<float> values_of(std::size_t rows) {
  std::vector<float> values(rows * width);
  for (std::size_t i = 0; i < values.size(); ++i) values[i] = static_cast<float>(static_cast<int>(i % 37) - 18) * 0.25f;
  return values;
}

// Every format there and back, in each type; a row that is named twice has the same bytes twice.
void rows_come_back() {
  const std::vector<float> values = values_of(3);
  std::vector<const std::uint8_t*> table;
  for (std::size_t i = 0; i < 3; ++i) table.push_back(reinterpret_cast<const std::uint8_t*>(values.data() + i * width));
  const std::vector<std::int64_t> index = {2, 0, 1}, twice = {0, 1, 0, 2};
  for (const char* name : {"bf16", "f32", "f64", "fp8", "fp8_ue8m0", "e5m6", "logfmt8", "logfmt10"}) {
    const ff::RowFormat format = ff::row_format_from_name(name);
    Payload payload(3, format);
    ff::encode_rows(payload.bytes.data(), format, {table.data(), 3}, index.data(), 3, width, ff::DType::f32);
    for (const ff::DType type : {ff::DType::bf16, ff::DType::f32, ff::DType::f64}) {
      const std::size_t bytes = width * ff::dtype_size(type);
      std::vector<std::uint8_t> found(4 * bytes);
      ff::decode_rows(found.data(), type, payload.rows(), twice.data(), 4, width, format);
      CHECK(std::memcmp(found.data(), found.data() + 2 * bytes, bytes) == 0);
      if (type != ff::DType::f32 || format.tiled) continue;
      CHECK(std::memcmp(found.data(), values.data() + 2 * width, bytes) == 0);  // these values are exact in each type
    }
  }
}

void sums_run_from_left_to_right() {
  const ff::RowFormat wide = ff::row_format_from_name("f32");
  Payload payload(4, wide);
  const float parts[4] = {1.0f, 0x1p-24f, 0x1p-24f, -1.0f};
  for (std::size_t i = 0; i < 4; ++i)
    for (std::size_t k = 0; k < width; ++k) std::memcpy(payload.bytes.data() + (i * width + k) * 4, &parts[i], 4);
  const std::vector<std::int64_t> index = {0, 1, 2, 3, 1, 2, 0, 3}, first = {0, 4, 4, 8};
  for (const char* to : {"f32", "bf16", "fp8"}) {
    const ff::RowFormat format = ff::row_format_from_name(to);
    Payload sums(3, format);
    ff::sum_rows(sums.bytes.data(), format, payload.rows(), index.data(), first.data(), 3, width, wide, ff::DType::f32);
    std::vector<float> found(3 * width);
    const std::vector<std::int64_t> all = {0, 1, 2};
    ff::decode_rows(found.data(), ff::DType::f32, sums.rows(), all.data(), 3, width, format);
    CHECK(found[0] == 0.0f);
    CHECK(found[width] == 0.0f);  // of no rows
    CHECK(found[2 * width] > 0.0f);
  }
  bool refused = false;
  try {
    ff::sum_rows(nullptr, wide, {nullptr, 0}, nullptr, nullptr, 0, width, wide, ff::DType::bf16);
  } catch (const std::invalid_argument&) {
    refused = true;
  }
  CHECK(refused);
}

}  // namespace

int main() {
  for (const char* isa : {"portable", "avx2", "avx512", "avx512vbmi"}) {
    if (!ff::isa_supported(isa)) continue;
    ff::set_isa(isa);
    rows_come_back();
    sums_run_from_left_to_right();
  }
}
