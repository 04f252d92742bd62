// A forked child may do nothing with its parent's engine. Its calls get a clear error, and
// it closes the parent's descriptors, so that peers see the parent's death at once.
#pragma once

#include <memory>

namespace farandole {

class Engine;

/// Installs the fork handlers of this process; once.
void watch_for_forks();
/// In a forked child, this engine's descriptors are closed.
void hide_from_children(const std::shared_ptr<Engine>& engine);
/// Throws Error(forked) in a child of a process that had an engine.
void refuse_in_child();
bool in_child();

}  // namespace farandole
