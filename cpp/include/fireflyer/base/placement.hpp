// Where threads run and where memory lies, as far as the system lets us.
//
// Which processors and which NUMA node is decided elsewhere (fireflyer.topology); here the system is asked. Nothing here
// fails: what is refused (an old kernel, a container's filter, a node that does not exist) is said in words and changes
// nothing. A thread is never put on processors that its creator was not allowed to use.
#pragma once

#include <cstddef>
#include <string>
#include <thread>
#include <vector>

namespace ff {

// Empty, or why the thread stays where it was. No processors: leave it alone. The name is what ps and top show.
std::string place_thread(std::thread& thread, const char* name, const std::vector<int>& cpus);

// For pages that nobody has touched yet, of a shared mapping for all who map it. Empty, or why it lies anywhere.
std::string prefer_node(void* base, std::size_t bytes, int node);
std::string interleave_nodes(void* base, std::size_t bytes, const std::vector<int>& nodes);

// On which NUMA node each of nodes.size() pages lies, spread evenly over the memory; a negative number is an errno: ENOENT
// where nobody has touched the page. Moves nothing. Empty, or why it cannot be told.
std::string page_nodes(const void* base, std::size_t bytes, std::vector<int>& nodes);

}  // namespace ff
