// A rank that cannot go on waits for something that has not come yet: otherwise it looks again and again, and takes the
// processor from those whose work it waits for.
#include <unistd.h>

#include <cstdio>
#include <vector>

#include "check.hpp"
#include "collectives/run.hpp"

namespace {

constexpr std::uint32_t slots = 4;
constexpr std::size_t chunk_bytes = 4096;

// Two nodes of two ranks; this is rank 1, whose array rank 0 reads where it lies. Rank 0 and the network are counters.
void a_lender_waits_for_results(std::uint64_t chunks) {
  const int fd = ff::Window::create(2, slots, chunk_bytes);
  const ff::Window window(fd, -1);
  ff::Group group;
  group.rank = 1;
  group.node_of_rank = {0, 0, 1, 1};
  group.labels = {"0", "1", "2", "3"};
  group.trees = {{-1, 0}, {1, -1}};
  group.timeout_ns = 1'000'000'000;
  group.check();
  ff::OpDescriptor op;
  op.kind = ff::OpKind::allreduce;
  op.count = chunks * chunk_bytes / sizeof(float);
  const ff::Geometry geometry(op, 0, chunk_bytes, group.world_size());
  std::vector<float> array(op.count, 1.0F);
  ff::Places lent;
  lent.in_arena = 0;
  window.enter(0, geometry, ff::Places{});
  window.enter(1, geometry, lent);
  for (const auto which : {ff::counter_reduced, ff::counter_out}) window.raise_pool(which, geometry.end);  // as the executor does
  const ff::PeerAccess peer_access(window, 1, nullptr, {});
  ff::Scratch scratch;
  const ff::RunContext context{group, window, peer_access, 1, scratch};
  const ff::Rules rules(window, group, geometry);
  auto* data = reinterpret_cast<char*>(array.data());
  const auto run = ff::pipeline_run(context, geometry, rules, data, data);

  const auto goes_on = [&] {
    bool moved = false;
    while (run->step()) moved = true;
    CHECK(!window.failed());
    if (!run->finished()) CHECK(!window.met(run->wants()));
    return moved;
  };
  CHECK(!goes_on());  // nothing of rank 0 is there
  const std::uint64_t network = static_cast<std::uint64_t>(window.network());
  for (std::uint64_t chunk = 0; chunk < chunks; ++chunk) {
    const bool last = chunk + 1 == chunks;
    window.advance(0, ff::counter_in, last ? geometry.end : chunk + 1);
    CHECK(goes_on());
    window.advance(0, ff::counter_reduced, last ? geometry.end : chunk + 1);
    window.advance(0, ff::counter_out, last ? geometry.end : chunk + 1);
    if (chunk + 1 >= slots || last) {  // the network brings results late: as late as slots, or the end, allow
      for (std::uint64_t done = chunk + 1 >= slots ? chunk + 1 - slots : 0; done <= chunk && (last || done + slots == chunk + 1); ++done) {
        CHECK(!goes_on());
        for (const auto counters : {ff::counter_done0, ff::counter_freed0}) {
          window.advance(static_cast<int>(network), static_cast<ff::Counter>(counters + static_cast<int>(done & 1)), (done >> 1) + 1);
        }
        CHECK(goes_on());
      }
    }
  }
  for (const auto which : {ff::counter_done0, ff::counter_done1, ff::counter_freed0, ff::counter_freed1}) window.advance(static_cast<int>(network), which, geometry.end >> 1);
  goes_on();
  CHECK(run->finished());
  close(fd);
}

}  // namespace

int main() {
  for (const std::uint64_t chunks : {1, 2, 3, 4, 5, 8, 9}) a_lender_waits_for_results(chunks);
  std::puts("pipeline run: all well");
  return 0;
}
