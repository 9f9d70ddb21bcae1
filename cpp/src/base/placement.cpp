#include "fireflyer/base/placement.hpp"

#include <pthread.h>
#include <sched.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <cerrno>
#include <cstdint>
#include <cstring>
#include <memory>

namespace ff {
namespace {

// Numbers of the kernel's interface (include/uapi/linux/mempolicy.h); the header is not everywhere.
constexpr int policy_preferred = 1;
constexpr int policy_interleave = 3;
constexpr int max_cpus = 8192;
constexpr int max_nodes = 1024;
constexpr int word_bits = 8 * sizeof(unsigned long);

using CpuSet = std::unique_ptr<cpu_set_t, void (*)(cpu_set_t*)>;

CpuSet empty_set() {
  CpuSet set(CPU_ALLOC(max_cpus), [](cpu_set_t* s) { CPU_FREE(s); });
  if (set) CPU_ZERO_S(CPU_ALLOC_SIZE(max_cpus), set.get());
  return set;
}

std::string bind(void* base, std::size_t bytes, int policy, const std::vector<int>& nodes) {
  std::array<unsigned long, max_nodes / word_bits> mask{};
  for (const int node : nodes) {
    if (node < 0 || node >= max_nodes) return "there is no NUMA node " + std::to_string(node);
    mask[static_cast<std::size_t>(node / word_bits)] |= 1UL << (node % word_bits);
  }
#ifdef SYS_mbind
  if (syscall(SYS_mbind, base, bytes, policy, mask.data(), static_cast<unsigned long>(max_nodes), 0U) == 0) return {};
  return std::strerror(errno);
#else
  (void)base, (void)bytes, (void)policy;
  return "this system has no mbind";
#endif
}

}  // namespace

std::string place_thread(std::thread& thread, const char* name, const std::vector<int>& cpus) {
  const pthread_t handle = thread.native_handle();
  pthread_setname_np(handle, name);
  if (cpus.empty()) return {};
  const std::size_t size = CPU_ALLOC_SIZE(max_cpus);
  const CpuSet allowed = empty_set(), wanted = empty_set();
  if (!allowed || !wanted) return "no memory for a processor set";
  if (const int error = pthread_getaffinity_np(handle, size, allowed.get())) return std::strerror(error);
  for (const int cpu : cpus) {
    if (cpu >= 0 && cpu < max_cpus && CPU_ISSET_S(static_cast<std::size_t>(cpu), size, allowed.get())) CPU_SET_S(static_cast<std::size_t>(cpu), size, wanted.get());
  }
  if (CPU_COUNT_S(size, wanted.get()) == 0) return "none of its processors may be used by this process";
  const int error = pthread_setaffinity_np(handle, size, wanted.get());
  return error == 0 ? std::string() : std::string(std::strerror(error));
}

std::string prefer_node(void* base, std::size_t bytes, int node) { return bind(base, bytes, policy_preferred, {node}); }

std::string interleave_nodes(void* base, std::size_t bytes, const std::vector<int>& nodes) { return bind(base, bytes, policy_interleave, nodes); }

std::string page_nodes(const void* base, std::size_t bytes, std::vector<int>& nodes) {
#ifdef SYS_move_pages
  const std::size_t page = static_cast<std::size_t>(sysconf(_SC_PAGESIZE)), count = (bytes + page - 1) / page;
  if (nodes.empty() || count == 0) return {};
  std::vector<const void*> pages;
  for (std::size_t i = 0; i < nodes.size(); ++i) pages.push_back(static_cast<const std::uint8_t*>(base) + i * count / nodes.size() * page);
  if (syscall(SYS_move_pages, 0, pages.size(), pages.data(), nullptr, nodes.data(), 0) == 0) return {};
  return std::strerror(errno);
#else
  (void)base, (void)bytes, (void)nodes;
  return "this system has no move_pages";
#endif
}

}  // namespace ff
