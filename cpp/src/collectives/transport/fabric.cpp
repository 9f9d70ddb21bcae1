#include "fireflyer/collectives/transport/fabric.hpp"

#include <dlfcn.h>

#include <stdexcept>

namespace ff {

// The module stays loaded: UCX leaves hooks and threads behind that outlive a communicator.
std::shared_ptr<Fabric> load_fabric(const std::string& module_path) {
  void* module = dlopen(module_path.c_str(), RTLD_NOW | RTLD_LOCAL);
  if (!module) {
    const char* why = dlerror();
    throw std::runtime_error(why ? why : "cannot load " + module_path);
  }
  using Open = Fabric* (*)(std::string*);
  const auto open = reinterpret_cast<Open>(dlsym(module, "ff_open_ucx"));
  if (!open) throw std::runtime_error(module_path + " is not the UCX module of this version");
  std::string why;
  std::shared_ptr<Fabric> fabric(open(&why));
  if (!fabric) throw std::runtime_error(why);
  return fabric;
}

}  // namespace ff
