// The version of this build: the git tag's, as pyproject.toml's provider finds it.
#pragma once

namespace farandole {

/// Such as "0.2.0" or "0.2.1.dev5+g1a2b3c4"; "0+source" of a build by CMake alone.
const char* version();

}  // namespace farandole
