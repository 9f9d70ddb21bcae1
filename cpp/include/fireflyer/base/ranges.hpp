// Many ranges of memory in one call: a checkpoint of ten thousand small tensors is copied and summed without a call for
// each of them.
#pragma once

#include <cstddef>
#include <cstdint>

namespace ff {

// Copies sizes[i] bytes from sources[i] to targets[i] for each i < n; no target overlaps another range. `threads` share
// the bytes. Long ranges are stored past the caches: nobody reads so much soon.
void copy_ranges(void* const* targets, const void* const* sources, const std::uint64_t* sizes, std::size_t n, int threads);

// sums[i] becomes the crc32c of what it was of before, followed by sizes[i] bytes from data + begins[i] on. Those bytes
// are copied to targets[i] where that is not null; targets may be null for no copies at all.
void crc32c_ranges(std::uint32_t* sums, const std::uint8_t* data, const std::uint64_t* begins, const std::uint64_t* sizes,
                   void* const* targets, std::size_t n);

}  // namespace ff
